"""Generated functions under torch.compile: registered operators whose CPU kernel is the plain PyTorch reference."""

from __future__ import annotations

import importlib
import shutil
from types import ModuleType

import pytest
import torch

from dsl.load import load
from dsl.spec import Case
from dsl.verify.inputs import Inputs, make_inputs
from tests.conftest import ROOT
from tests.test_launcher import golden, golden_spec

FUNCTIONS = {
    "decode": (
        "bf16_16_16",
        "bf16_16_2_256",
        "bf16_3_3",
        "bf16_32_4",
        "bf16_4_1",
        "fp16_32_8",
        "fp16_40_8",
        "fp16_64_8",
    ),
    "prefill": ("bf16_16_72", "bf16_32_128", "bf16_4_72", "bf16_8_128"),
    "chunked": ("llama3_8b_chunked", "llama3_70b_chunked"),
}
DISPATCHES = {"decode": "paged_attention_decode", "prefill": "attention_forward", "chunked": "llama3_chunked"}
BLOCKS = [(stem, name) for stem, names in FUNCTIONS.items() for name in names]
CASE = Case((3, 0, 5), (9, 4, 20))
LSE = """
attention with_lse { query = single  kv = paged(block = 16)  dtype = bf16  heads = 4 / 2  head_dim = 16  lse = true }
"""


def example(stem: str, block: str, case: Case = CASE) -> Inputs:
    return make_inputs(golden_spec(stem, block), case)


def operator(module: ModuleType, name: str) -> torch._ops.OpOverloadPacket:
    return getattr(getattr(torch.ops, module._LIBRARY), name)


def compiled(function, **options):
    """Traced whole by Dynamo and AOT autograd; what Inductor would make of it is its own matter."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


# Registration.


@pytest.mark.parametrize(("stem", "block"), BLOCKS)
def test_operators_pass_opcheck(stem: str, block: str) -> None:
    inputs = example(stem, block)
    packet = operator(golden(stem), block)
    torch.library.opcheck(packet.default, inputs.positional)
    out = torch.empty_like(golden(stem).__dict__[block].reference(*inputs.positional))
    torch.library.opcheck(packet.out, inputs.positional, {"out": out})


@pytest.mark.parametrize("stem", DISPATCHES)
def test_operators_of_dispatches_pass_opcheck(stem: str) -> None:
    packet = operator(golden(stem), DISPATCHES[stem])
    for block in FUNCTIONS[stem][:2]:
        inputs = example(stem, block)
        torch.library.opcheck(packet.default, inputs.positional)
        out = torch.empty_like(packet(*inputs.positional))
        torch.library.opcheck(packet.out, inputs.positional, {"out": out})


@pytest.fixture(scope="module")
def lse_module(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModuleType, Inputs]:
    from dsl.check import load_spec
    from dsl.pipeline import build, read_source

    path = tmp_path_factory.mktemp("lse") / "lse.attn"
    path.write_text(LSE)
    spec = load_spec(read_source(path)).attentions[0]
    return load(build(path, path.parent)), make_inputs(spec, CASE)


def test_operators_with_two_results(lse_module: tuple[ModuleType, Inputs]) -> None:
    module, inputs = lse_module
    packet = operator(module, "with_lse")
    torch.library.opcheck(packet.default, inputs.positional)
    right = module.with_lse.reference(*inputs.positional)
    results = {"out": torch.empty_like(right[0]), "out_lse": torch.empty_like(right[1])}
    torch.library.opcheck(packet.out, inputs.positional, results)
    attend = compiled(module.with_lse)
    torch.testing.assert_close(attend(*inputs.positional), right)
    returned = attend(*inputs.positional, **results)
    torch.testing.assert_close((results["out"], results["out_lse"]), right)
    torch.testing.assert_close(returned, right)
    with pytest.raises(Exception, match="with_lse: give all results or none"):
        attend(*inputs.positional, out=results["out"])


def test_two_copies_and_an_import_live_together(tmp_path) -> None:
    imported = importlib.import_module("generated.decode")
    copy = load(shutil.copy(ROOT / "generated" / "decode.py", tmp_path / "copied.py"))
    again = load(shutil.copy(ROOT / "generated" / "decode.py", tmp_path / "copied_again.py"))
    assert len({id(module.bf16_4_1) for module in (imported, copy, again)}) == 3
    inputs = example("decode", "bf16_4_1")
    right = imported.bf16_4_1.reference(*inputs.positional)
    for module in (imported, copy, again):
        torch.testing.assert_close(compiled(module.bf16_4_1)(*inputs.positional), right)
        assert operator(module, "bf16_4_1") is operator(imported, "bf16_4_1")


# torch.compile.


@pytest.mark.parametrize("stem", DISPATCHES)
def test_the_whole_graph_compiles(stem: str) -> None:
    block = FUNCTIONS[stem][0]
    inputs = example(stem, block)
    for name in (block, DISPATCHES[stem]):
        function = getattr(golden(stem), name)

        def layer(*tensors: torch.Tensor, function=function) -> torch.Tensor:
            return 2 * function(*tensors) + 1

        right = 2 * function.reference(*inputs.positional) + 1
        torch.testing.assert_close(compiled(layer)(*inputs.positional), right)


@pytest.mark.parametrize("stem", DISPATCHES)
def test_out_is_mutated(stem: str) -> None:
    block = FUNCTIONS[stem][0]
    inputs = example(stem, block)
    for name in (block, DISPATCHES[stem]):
        function = getattr(golden(stem), name)

        def layer(*tensors: torch.Tensor, out: torch.Tensor, function=function) -> torch.Tensor:
            out += 1
            result = function(*tensors, out=out)
            return result + out

        right = function.reference(*inputs.positional)
        buffer = torch.full((len(right), 2, *right.shape[1:]), 7.0, dtype=right.dtype)
        out = buffer[:, 0]
        torch.testing.assert_close(compiled(layer)(*inputs.positional, out=out), 2 * right)
        torch.testing.assert_close(out, right)
        assert (buffer[:, 1] == 7.0).all()


@pytest.mark.skipif(shutil.which("g++") is None, reason="not run: Inductor needs a C++ compiler")
def test_inductor_reads_and_writes_a_view() -> None:
    function = golden("decode").paged_attention_decode
    inputs = example("decode", "bf16_4_1")
    buffer = torch.full((3, 2, 4, 128), 7.0, dtype=torch.bfloat16)

    def layer(*tensors: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out += 1
        return 2 * function(*tensors, out=out)

    torch._dynamo.reset()
    right = function.reference(*inputs.positional)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(*inputs.positional, out=buffer[:, 0]), 2 * right)
    torch.testing.assert_close(buffer[:, 0], right)
    assert (buffer[:, 1] == 7.0).all()


@pytest.mark.parametrize("stem", DISPATCHES)
def test_shapes_are_dynamic(stem: str) -> None:
    """One trace serves every batch, length and table."""
    block = FUNCTIONS[stem][0]
    function = getattr(golden(stem), DISPATCHES[stem])
    attend = compiled(function, dynamic=True)
    cases = [Case((3, 4, 5), (9, 4, 20)), Case((7, 2), (40, 31)), Case((6, 1, 2, 3), (70, 3, 5, 6))]
    for place, case in enumerate(cases):
        inputs = example(stem, block, case)
        torch._dynamo.config.error_on_recompile = place > 0
        try:
            result = attend(*inputs.positional)
        finally:
            torch._dynamo.config.error_on_recompile = False
        torch.testing.assert_close(result, function.reference(*inputs.positional))


@pytest.mark.parametrize("stem", DISPATCHES)
def test_what_a_graph_cannot_hold_is_refused(stem: str) -> None:
    inputs = example(stem, FUNCTIONS[stem][0])
    for name in (FUNCTIONS[stem][0], DISPATCHES[stem]):
        for keywords in ({"check": True}, {"workspace": torch.empty(1 << 16, dtype=torch.uint8)}):
            with pytest.raises(Exception, match=f"{name}: workspace and check=True are not available"):
                compiled(getattr(golden(stem), name))(*inputs.positional, **keywords)


@pytest.mark.parametrize("stem", DISPATCHES)
def test_wrong_tensors_are_refused_in_a_graph(stem: str) -> None:
    first, *rest = example(stem, FUNCTIONS[stem][0]).positional
    with pytest.raises(Exception, match=r"torch\.float32"):
        compiled(getattr(golden(stem), FUNCTIONS[stem][0]))(first.float(), *rest)


@pytest.mark.parametrize("stem", DISPATCHES)
def test_gradients_are_refused_in_a_graph(stem: str) -> None:
    block = FUNCTIONS[stem][0]
    first, *rest = example(stem, block).positional
    first.requires_grad_()
    attend = compiled(getattr(golden(stem), block))
    with pytest.raises(Exception, match="requires grad"):
        attend(first, *rest)
    with torch.no_grad():
        assert attend(first, *rest).isfinite().all()


@pytest.mark.parametrize("stem", DISPATCHES)
def test_export(stem: str) -> None:
    function = getattr(golden(stem), DISPATCHES[stem])

    class Layer(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return function(*tensors)

    inputs = example(stem, FUNCTIONS[stem][0])
    exported = torch.export.export(Layer(), inputs.positional)
    targets = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert targets == [operator(golden(stem), DISPATCHES[stem]).default]
    torch.testing.assert_close(exported.module()(*inputs.positional), function.reference(*inputs.positional))


@pytest.mark.parametrize("wrong", [torch.empty(3, 4, 128, dtype=torch.bfloat16), torch.empty(2, 4, 128)])
def test_a_result_that_does_not_fit_is_refused_in_a_graph(wrong: torch.Tensor) -> None:
    inputs = make_inputs(golden_spec("decode", "bf16_4_1"), Case((1, 1), (9, 4)))
    with pytest.raises((TypeError, ValueError), match="bf16_4_1: out"):
        operator(golden("decode"), "bf16_4_1").out(*inputs.positional, wrong)
