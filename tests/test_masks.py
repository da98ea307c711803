"""Masks, scores, sinks and params, through all stages: verified, registered, explained, drawn."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from dsl.check import load_spec
from dsl.cli.group import group
from dsl.diagnostics import SpecError
from dsl.expr.visible import leaves_no_hole, visible_ranges
from dsl.load import load
from dsl.pipeline import build, read_source
from dsl.plan import plan_module
from dsl.plan.prefill import surroundings
from dsl.printer import print_attention
from dsl.render import render
from dsl.source import Source
from dsl.spec import Case, Spec
from dsl.verify.inputs import make_inputs
from dsl.verify.runner import verify_files
from tests.conftest import MODELS, ROOT, run_python
from tests.strategies import conditions, scores
from tests.test_intervals import PARAMS, element, spec_of, visible, world
from tests.test_operator import compiled

FOLDER = ROOT / "tests" / "specs"
BLOCKS = {
    "masks_prefill": ("docs", "stream", "prefixed_by_seq", "chunked3", "keyed", "fancy", "scaled", "biased"),
    "masks_decode": ("stream", "fancy", "fixed_stream", "split_slots", "by_head"),
}
FUNCTIONS = """
attention packed {
    query = packed  kv = packed  dtype = bf16  heads = 4 / 2  head_dim = 16  lse = true
    param slopes[head] : fp32
    param table[5] : fp32
    param window : int32
    param cap : fp32
    param on : bool
    mask  = causal and q - kv < window or on and kv == 0
    score = softcap(score, cap) + slopes[h] * (kv - q) + where(kv < 3, table[kv + 2], 0)
    sink  = slopes[h]
}
attention other from packed { dtype = fp16 }
dispatch either = [packed, other]
attention paged {
    query = single  kv = paged(block = 16)  dtype = fp16  heads = 4 / 2  head_dim = 16
    param slopes[head] : fp32
    mask  = kv % 2 == 0
    score = score + slopes[h] * kv
}
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    folder = tmp_path_factory.mktemp("functions")
    spec = folder / "functions.attn"
    spec.write_text(FUNCTIONS)
    return load(build(spec, folder))


def example(name: str):
    spec = load_spec(Source.from_text(FUNCTIONS, "functions.attn")).attention(name)
    return spec, make_inputs(spec, Case((3, 0, 5), (9, 4, 20)))


@pytest.mark.parametrize("stem", BLOCKS)
def test_kernels_in_the_interpreter(stem: str) -> None:
    report = verify_files([FOLDER / f"{stem}.attn"], device="cpu", only=BLOCKS[stem])
    assert len(report.rows) >= 8 * len(BLOCKS[stem]) and not report.failures, report.failures


@pytest.mark.slow
@pytest.mark.parametrize("stem", BLOCKS)
def test_all_kernels_in_the_interpreter(stem: str) -> None:
    report = verify_files([FOLDER / f"{stem}.attn"], device="cpu")
    assert report.rows and not report.failures, report.failures


def shrunk(spec: Spec) -> Spec:
    """The same expressions over a few heads, of fewer dimensions where these are a power of two."""
    kv_heads = min(spec.kv_heads, 2)
    dim = min(spec.head_dim_qk, 32) if spec.head_dim_qk in (64, 128, 256) else spec.head_dim_qk
    heads = kv_heads * min(spec.group, 3)
    return replace(spec, heads=heads, kv_heads=kv_heads, head_dim_qk=dim, head_dim_v=dim)


QUICK = ("documents", "gemma2", "gpt_oss")
"""Models that every run verifies; the others take patience."""


@pytest.mark.parametrize(
    "path",
    [path if path.stem in QUICK else pytest.param(path, marks=pytest.mark.slow) for path in MODELS],
    ids=lambda path: path.stem,
)
def test_models_with_fewer_heads_in_the_interpreter(path: Path) -> None:
    file = load_spec(read_source(path))
    text = "\n".join(print_attention(shrunk(spec)) for spec in file.attentions)
    report = verify_files([Source.from_text(text, path.name)], device="cpu")
    assert report.rows and not report.failures, report.failures


@pytest.mark.slow
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_models_in_the_interpreter(path: Path) -> None:
    report = verify_files([path], device="cpu")
    assert report.rows and not report.failures, report.failures


@pytest.mark.parametrize("folder", sorted(ROOT.glob(".triton*")), ids=lambda folder: folder.name)
def test_another_version_of_triton_computes_the_same(folder: Path) -> None:
    path = os.pathsep.join((str(folder), str(ROOT)))
    chosen = [word for name in ("fancy", "docs") for word in ("--only", name)]
    done = run_python("-m", "dsl", "verify", FOLDER / "masks_prefill.attn", *chosen, environment={"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()


# Operators.


@pytest.mark.parametrize("name", ["packed", "paged", "either"])
def test_operators_with_params_pass_opcheck(functions: ModuleType, name: str) -> None:
    _, inputs = example("packed" if name == "either" else name)
    packet = getattr(getattr(torch.ops, functions._LIBRARY), name)
    torch.library.opcheck(packet.default, (*inputs.positional, *inputs.keywords.values()))


@pytest.mark.parametrize("name", ["packed", "paged", "either"])
def test_compiled_functions_with_params_break_no_graph(functions: ModuleType, name: str) -> None:
    _, inputs = example("packed" if name == "either" else name)
    function = getattr(functions, name)
    wanted = function.reference(*inputs.positional, **inputs.keywords)
    found = compiled(lambda *tensors, **params: function(*tensors, **params))(*inputs.positional, **inputs.keywords)
    torch.testing.assert_close(found, wanted)


def test_a_number_is_no_reason_to_compile_again(functions: ModuleType) -> None:
    _, inputs = example("packed")
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    call = torch.compile(
        lambda window, *tensors, **params: functions.packed(*tensors, window=window, **params),
        fullgraph=True,
        backend=counter,
        dynamic=True,
    )
    params = {name: value for name, value in inputs.keywords.items() if name != "window"}
    first = call(7, *inputs.positional, **params)[0]
    frames = counter.frame_count
    outs = [call(window, *inputs.positional, **params)[0] for window in (13, 3, 11)]
    assert counter.frame_count == frames
    assert not torch.equal(first, outs[1])


def test_the_schema_names_every_param(functions: ModuleType) -> None:
    schema = str(getattr(torch.ops, functions._LIBRARY).packed.default._schema)
    assert "Tensor slopes, Tensor table, SymInt window, float cap, bool on) -> (Tensor, Tensor)" in schema


def test_the_reference_is_the_oracle_of_itself(functions: ModuleType) -> None:
    from dsl.verify.oracle import oracle

    spec, inputs = example("packed")
    out, lse = functions.packed.reference(*inputs.positional, **inputs.keywords)
    wanted, wanted_lse = oracle(spec, inputs)
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)


CHECKED = """
import torch
from dsl.load import load
from dsl.verify.interpreter import repair

repair()
module = load("{path}")
bounds = torch.tensor([0, 4], dtype=torch.int32)
arguments = [torch.randn(4, heads, 16).bfloat16() for heads in (4, 2, 2)] + [bounds, bounds]
params = dict(slopes=torch.ones(4), window=3, cap=5.0, on=False)
module.packed(*arguments, table=torch.ones(5), **params, check=True)
print("within")
try:
    module.packed(*arguments, table=torch.ones(5)[:5].as_strided((5,), (1,)), **{{**params, "window": 9}}, check=True)
    print("within too")
    module.narrow(*arguments, table=torch.ones(5), **params)
    module.narrow(*arguments, table=torch.ones(5), **params, check=True)
except ValueError as error:
    print(error)
"""


def test_check_tells_of_an_index_outside(tmp_path: Path) -> None:
    """Only where a branch is taken and the pair is visible."""
    spec = tmp_path / "checked.attn"
    narrow = "attention narrow from packed { score = score + where(kv > 0, table[kv + 2], 0) }\n"
    spec.write_text(FUNCTIONS + narrow)
    script = CHECKED.format(path=build(spec, tmp_path))
    done = run_python("-c", script, environment={"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr.decode()
    *within, refused = done.stdout.decode().splitlines()
    assert within == ["within", "within too"]
    assert refused == "narrow: a visible pair of sequence 0 reads a param outside of it"


@settings(max_examples=60, deadline=None)
@given(
    mask=conditions(),
    score=scores(),
    family=st.sampled_from(("query = single kv = paged(block = 16)", "query = packed kv = packed")),
    sink=st.sampled_from(("0", "slopes[h]", "-1.5 * slopes[h] + 2 * b")),
)
def test_what_expressions_print_would_pass_a_reviewer(mask: str, score: str, family: str, sink: str) -> None:
    fields = f"{family} dtype = bf16 heads = 8 / 4 head_dim = 64 {PARAMS}"
    text = f"attention layer {{ {fields} mask = {mask} score = {score} sink = {sink} }}"
    try:
        file = load_spec(Source.from_text(text, "layer.attn"))
    except SpecError:
        return  # a constant without a value
    body = render(plan_module(file))
    for command in (["check", "--select", "E,F,I,W", "-"], ["format", "--check", "-"]):
        arguments = [sys.executable, "-m", "ruff", command[0], "--isolated", "--line-length", "120", *command[1:]]
        run = subprocess.run(arguments, input=body.encode(), capture_output=True)
        assert run.returncode == 0, run.stdout.decode()


def test_what_is_hoisted_is_not_mistaken_for_what_is_not() -> None:
    """Two conditions of one shape, one of which has the key in it: only the other stands ahead of the loop."""
    mask = "((b <= q and b < q) == (kv <= q and kv < h))"
    fields = f"query = single kv = paged(block = 16) dtype = bf16 heads = 4 / 2 head_dim = 64 mask = {mask}"
    plan = plan_module(load_spec(Source.from_text(f"attention layer {{ {fields} }}", "layer.attn")))
    shaping = plan.blocks[0].kernel.shaping  # type: ignore[attr-defined]
    names = [line.split(" = ")[0] for line in shaping.ahead if " = " in line]
    assert len(names) == len(set(names)) and not any("==" in line for line in shaping.ahead)
    later = "\n".join((*shaping.ahead, *shaping.partial.tests, *shaping.ranges))
    assert all(later.count(name) > 1 for name in names), later


# What bounds tell of the keys that a tile sees.


@settings(max_examples=150, deadline=None)
@given(mask=conditions(), q_len=st.integers(1, 6), first=st.integers(0, 12), window=st.integers(-3, 9))
def test_ranges_without_holes_have_none(mask: str, q_len: int, first: int, window: int) -> None:
    spec = spec_of(mask)
    ranges = surroundings(spec).ranges
    found = visible_ranges(spec.mask, ranges)
    if len(found) != 1 or not leaves_no_hole(found[0], ranges):
        return
    rows, keys, _ = world(q_len + first, 22, 1, 1, 2, window)
    read = element([1, 1, 2, 2, 2])
    seen = [any(visible(spec.mask, {**row, **key}, read) for row in rows[first:]) for key in keys]
    where = [place for place, holds in enumerate(seen) if holds]
    assert where == list(range(where[0], where[-1] + 1)) if where else True


@pytest.mark.parametrize(
    ("mask", "holds"),
    [
        ("causal and q - kv < 5", True),
        ("q // 8 == kv // 8", True),
        ("causal or kv < window", True),
        ("causal and 3 <= q - kv < 5", True),
        ("abs(q - kv) < 5", True),
        ("2 * q == kv", False),
        ("kv <= q and doc[q_token] == doc[kv_token]", False),
        ("kv == doc[q_token]", False),
        ("kv % 2 == 0", False),
    ],
)
def test_which_ranges_leave_no_hole(mask: str, holds: bool) -> None:
    spec = spec_of(mask)
    ranges = surroundings(spec).ranges
    assert all(leaves_no_hole(found, ranges) for found in visible_ranges(spec.mask, ranges)) == holds


# Text.


@pytest.mark.parametrize(
    ("written", "same"),
    [("kv >= q-3", "kv >= q - 3"), ("kv >= q -3", "kv >= q - 3"), ("kv < 8-1", "kv < 7"), ("q-1<kv", "(q - 1) < kv")],
)
def test_a_sign_that_touches_its_number(written: str, same: str) -> None:
    """R88."""
    assert spec_of(written).mask == spec_of(same).mask


def test_constants_divide_as_the_kernel_does() -> None:
    """R89, folded."""
    assert spec_of("kv == -8 // 3").mask == spec_of("kv == -3").mask
    assert spec_of("kv == -8 % 3").mask == spec_of("kv == 1").mask


def text_of(mask: str, name: str = "layer") -> str:
    fields = f"query = packed kv = packed dtype = bf16 heads = 4 / 2 head_dim = 64 {PARAMS} mask = {mask}"
    return f"attention {name} {{ {fields} }}"


def test_blocks_with_one_mask_share_a_kernel_and_others_do_not() -> None:
    text = text_of("causal") + "attention wide from layer { heads = 8 / 2 }" + text_of("q - kv < 3", "other")
    plan = plan_module(load_spec(Source.from_text(text, "layer.attn")))
    layer, wide, other = plan.blocks
    assert layer.kernel is wide.kernel and other.kernel is not layer.kernel


def test_the_hopper_kernel_says_what_it_does_not_know() -> None:
    fields = "query = packed kv = packed dtype = bf16 heads = 4 head_dim = 64"
    for clause, word in {
        "mask = causal": "mask",
        "score = score * 2": "score",
        "sink = 0.5": "sink",
        "param spare : int32": "param",
    }.items():
        plan = plan_module(load_spec(Source.from_text(f"attention a {{ {fields} {clause} }}", "a.attn")))
        assert plan.blocks[0].hopper is None and word in (plan.blocks[0].no_hopper or "")
        assert not plan.has_hopper


@pytest.mark.parametrize(
    ("mask", "hides"),
    [
        ("causal", False),
        ("q - kv < 128", True),
        ("causal and kv >= 0", False),
        ("kv < q", True),
        ("kv <= q + 3 or kv == 7", False),
        ("causal and q // 8 == kv // 8", True),
        ("kv < prefix or causal", True),
        ("causal and prefix > 0", True),
    ],
)
def test_a_mask_that_hides_nothing_of_a_decode_is_left_out(mask: str, hides: bool) -> None:
    """Judged by the bounds of the mask; `kv < prefix or causal` hides nothing either, which they do not tell."""
    fields = "query = single kv = paged(block = 16) dtype = bf16 heads = 4 / 2 head_dim = 64"
    text = f"attention a {{ {fields} param prefix : int32 mask = {mask} }}"
    (block,) = plan_module(load_spec(Source.from_text(text, "a.attn"))).blocks
    assert block.spec.has_mask and block.kernel.shaping.masked == hides  # type: ignore[attr-defined]
    without = text.replace("param prefix : int32", "")
    if "prefix" not in mask:
        (block,) = plan_module(load_spec(Source.from_text(without, "a.attn"))).blocks
        assert (block.decode_hopper is None) == hides and ("mask" in (block.no_hopper or "")) == hides


# Pictures.


def drawn(tmp_path: Path, *arguments: str, spec: Path = ROOT / "specs" / "models" / "mistral.attn") -> tuple[int, str]:
    path = tmp_path / "mask.svg"
    run = CliRunner().invoke(group, ["explain", str(spec), "--mask", str(path), *arguments])
    return run.exit_code, path.read_text() if run.exit_code == 0 else run.output


def counted(picture: str, kind: str) -> int:
    space = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(picture.encode())
    (found,) = [each for each in root.iter(f"{space}g") if each.get("class") == kind]
    return len(found.findall(f"{space}rect"))


def test_a_picture_of_a_mask(tmp_path: Path) -> None:
    spec = tmp_path / "layer.attn"
    spec.write_text(text_of("causal"))
    code, picture = drawn(tmp_path, "--lengths", "32,32", "--tiles", "8,8", spec=spec)
    assert code == 0
    assert counted(picture, "full") == 6 and counted(picture, "partial") == 4
    assert "528 of 1024 pairs are visible" in picture
    assert "6 full, 4 partial, 6 empty of 16" in picture


def test_a_picture_with_params(tmp_path: Path) -> None:
    spec = ROOT / "specs" / "models" / "documents.attn"
    arguments = ("--lengths", "32,32", "--tiles", "8,8", "--param", "document=0,1")
    code, picture = drawn(tmp_path, *arguments, spec=spec)
    assert code == 0 and "document = [0, 1]" in picture
    assert counted(picture, "full") == 2 and counted(picture, "partial") == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--block", "x"), "there is no block x; the blocks are mistral_prefill, mistral_decode"),
        (("--lengths", "64"), "is not two whole numbers"),
        (("--lengths", "9000,9000"), "too many to draw"),
        (("--param", "depth=3"), "has no param depth"),
        (("--param", "depth=x"), "is no param and its values"),
    ],
)
def test_pictures_that_cannot_be_drawn(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    code, output = drawn(tmp_path, *arguments)
    assert code == 2 and words in " ".join(output.split())


@pytest.mark.parametrize("path", [*MODELS, *sorted(FOLDER.glob("masks_*.attn"))], ids=lambda path: path.stem)
def test_every_mask_can_be_drawn_and_explained(path: Path, tmp_path: Path) -> None:
    for spec in load_spec(read_source(path)).attentions:
        code, picture = drawn(tmp_path, "--block", spec.name, "--lengths", "9,12", "--tiles", "4,4", spec=path)
        assert code == 0, picture
        ElementTree.fromstring(picture.encode())
    run = CliRunner().invoke(group, ["explain", str(path)])
    assert (run.exit_code == 0 and "a row sees" in run.output) or path.stem == "t5"


def test_claims_of_kernels_hold_where_they_are_printed() -> None:
    """Every exact range of the models is one of the forms that the small worlds of test_intervals try."""
    for path, kind in product(MODELS, ("packed",)):
        for block in plan_module(load_spec(read_source(path))).blocks:
            if block.spec.query == kind and block.spec.has_mask:
                shaping = block.kernel.shaping  # type: ignore[attr-defined]
                assert shaping.has_full and (shaping.bounds_tell or shaping.scan), block.spec.name
