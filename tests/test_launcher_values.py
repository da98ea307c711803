"""What generated launchers promise about values: clamped lengths, the caller's buffers, empty batches.

The tests marked `interpreted` run in one subprocess, because Triton's interpreter is switched on before import or not
at all.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dsl.check import load_spec
from dsl.load import load
from dsl.pipeline import build, read_source
from dsl.spec import Spec
from dsl.verify.cases import Adversity
from tests.conftest import run_python
from tests.test_launcher import assert_right, decode_inputs, index, prefill_inputs

SMALL = """
attention decode { query = single  kv = paged(block = 16)  dtype = bf16  heads = 4 / 2  head_dim = 16  lse = true }
attention prefill { query = packed  kv = packed  dtype = bf16  heads = 4 / 2  head_dim = 16  lse = true }
"""


@functools.cache
def small() -> tuple[ModuleType, dict[str, Spec]]:
    """The module of SMALL, rendered anew, and its specs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.attn"
        path.write_text(SMALL)
        return load(build(path, folder)), {spec.name: spec for spec in load_spec(read_source(path)).attentions}


def bit_equal(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


INTERPRETED: dict[str, Callable[[], None]] = {}


@functools.cache
def outcomes() -> tuple[dict[str, str | None], str]:
    """Run every test marked `interpreted` in one process: what went wrong in each, and how the process ended."""
    done = run_python("-m", "tests.test_launcher_values", environment={"TRITON_INTERPRET": "1"})
    found = dict(json.loads(line) for line in done.stdout.decode().splitlines())
    return found, f"the process ended with status {done.returncode} before or in this test\n{done.stderr.decode()}"


def interpreted(test: Callable[[], None]) -> Callable[[], None]:
    INTERPRETED[test.__name__] = test

    @functools.wraps(test)
    def outcome() -> None:
        found, end = outcomes()
        problem = found.get(test.__name__, end)
        assert problem is None, problem

    return outcome


def main() -> None:
    from dsl.verify.interpreter import repair

    repair()
    for name, test in INTERPRETED.items():
        try:
            test()
            problem = None
        except Exception:
            problem = traceback.format_exc()
        print(json.dumps([name, problem]), flush=True)


@interpreted
def test_lengths_are_clamped() -> None:
    module, specs = small()
    inputs = decode_inputs(specs["decode"], (40, 48, 0, 0))
    arguments = dict(inputs.arguments)
    right = module.decode(**arguments)
    assert_right(specs["decode"], inputs, right)
    assert (right[0][2:] == 0).all() and (right[1][:, 2:] == -torch.inf).all()
    arguments["seq_lens"] = index(40, 2**31 - 1, -1, -(2**31))
    assert bit_equal(module.decode(**arguments), right)
    arguments["seq_lens"] = torch.tensor([40, 2**40 + 1, -(2**40), -1])
    assert bit_equal(module.decode(**arguments), right)


@interpreted
def test_indices_of_64_bits_and_with_strides() -> None:
    module, specs = small()
    arguments = dict(decode_inputs(specs["decode"]).arguments)
    right = module.decode(**arguments)
    wide = {name: arguments[name].long() for name in ("block_tables", "seq_lens")}
    assert bit_equal(module.decode(**{**arguments, **wide}), right)
    spread = {"block_tables": torch.cat([wide["block_tables"], wide["block_tables"] + 99], 1)[:, :19]}
    spread["seq_lens"] = torch.stack([arguments["seq_lens"], index(9, 9, 9, 9)], 1)[:, 0]
    assert bit_equal(module.decode(**{**arguments, **spread}), right)


@interpreted
def test_unaligned_tensors() -> None:
    module, specs = small()
    for name, inputs in (
        ("decode", decode_inputs(specs["decode"], adversity=Adversity(views="odd"))),
        ("prefill", prefill_inputs(specs["prefill"], Adversity(views="odd"))),
    ):
        assert inputs.positional[0].data_ptr() % 16
        assert_right(specs[name], inputs, getattr(module, name)(*inputs.positional))


@interpreted
def test_out_is_written_and_nothing_beside_it() -> None:
    module, specs = small()
    for name, inputs in (("decode", decode_inputs(specs["decode"])), ("prefill", prefill_inputs(specs["prefill"]))):
        rows = inputs.positional[0].size(0)
        buffer = torch.full((rows + 1, 5, 24), 7.0, dtype=torch.bfloat16)
        lse_buffer = torch.full((6, rows + 2), 7.0)
        out, lse = buffer[1:, :4, 8:], lse_buffer[1:5, 1:-1]
        result = getattr(module, name)(*inputs.positional, out=out, out_lse=lse)
        assert result[0] is out and result[1] is lse
        assert bit_equal(result, getattr(module, name)(*inputs.positional))
        out.fill_(7.0)
        lse.fill_(7.0)
        assert (buffer == 7.0).all() and (lse_buffer == 7.0).all()


@interpreted
def test_workspace() -> None:
    module, specs = small()
    inputs = decode_inputs(specs["decode"], (5, 700))
    right = module.decode(*inputs.positional)
    with pytest.raises(ValueError, match=r"decode: workspace is 16 bytes on cpu, not \d+ contiguous bytes") as refusal:
        module.decode(*inputs.positional, workspace=torch.empty(16, dtype=torch.uint8))
    needed = int(re.findall(r"not (\d+) contiguous bytes", str(refusal.value))[0])
    with pytest.raises(ValueError, match=f"workspace is {needed - 1} bytes"):
        module.decode(*inputs.positional, workspace=torch.empty(needed - 1, dtype=torch.uint8))
    workspace = torch.zeros(needed, dtype=torch.uint8)
    assert bit_equal(module.decode(*inputs.positional, workspace=workspace), right)
    assert workspace.any(), "the workspace was not used"


@interpreted
def test_nothing_to_do() -> None:
    module, specs = small()
    out, lse = module.decode(*decode_inputs(specs["decode"], ()).positional)
    assert out.shape == (0, 4, 16) and lse.shape == (4, 0) and out.dtype == torch.bfloat16
    q = torch.empty(0, 4, 16, dtype=torch.bfloat16)
    for starts in ([0], [0, 0], [0, 0, 0]):
        out, lse = module.prefill(q, q[:, :2], q[:, :2], index(*starts), index(*starts))
        assert out.shape == (0, 4, 16) and lse.shape == (4, 0)


@interpreted
def test_queries_without_keys_are_zero() -> None:
    module, specs = small()
    arguments = dict(decode_inputs(specs["decode"], (3, 20)).arguments)
    no_table = {**arguments, "block_tables": arguments["block_tables"][:, :0]}
    no_pages = {**no_table, "k_cache": arguments["k_cache"][:0], "v_cache": arguments["v_cache"][:0]}
    never_filled = {**no_pages, "block_tables": index(-1, 9).view(2, 1), "seq_lens": index(0, -5)}
    for some in (no_table, no_pages, never_filled):
        out, lse = module.decode(**some)
        assert (out == 0).all() and (lse == -torch.inf).all()
    prefill = dict(prefill_inputs(specs["prefill"]).arguments)
    no_keys = {"k": prefill["k"][:0], "v": prefill["v"][:0]}
    no_sequences = {"cu_seqlens_q": index(0), "cu_seqlens_k": index(0)}
    for replaced in (no_keys, no_sequences):
        out, lse = module.prefill(**{**prefill, **replaced})
        assert (out == 0).all() and (lse == -torch.inf).all()


@interpreted
def test_bounds_outside_of_the_tensors() -> None:
    module, specs = small()
    arguments = dict(prefill_inputs(specs["prefill"], Adversity(views="aligned")).arguments)
    tokens, keys = arguments["q"].size(0), arguments["k"].size(0)
    whole = {"cu_seqlens_q": index(0, tokens), "cu_seqlens_k": index(0, keys)}
    right = module.prefill(**{**arguments, **whole})
    beyond = {"cu_seqlens_q": torch.tensor([-(2**40), 2**40]), "cu_seqlens_k": torch.tensor([-9, keys + 1])}
    assert bit_equal(module.prefill(**{**arguments, **beyond}), right)
    for starts in ([9, 3, 20, 5], [-5, 40, -7, 99], [30, 20, 10, 0]):  # no order: no row has a meaning
        disordered = {"cu_seqlens_q": index(*starts), "cu_seqlens_k": index(*reversed(starts))}
        assert module.prefill(**{**arguments, **disordered})[0].isfinite().all()


@interpreted
def test_gradients_are_refused_where_they_are_recorded_only() -> None:
    module, specs = small()
    inputs = decode_inputs(specs["decode"], (9,))
    inputs["query"].requires_grad_()
    with pytest.raises(ValueError, match="query requires grad"):
        module.decode(*inputs.positional)
    with torch.no_grad():
        assert_right(specs["decode"], inputs, module.decode(*inputs.positional))


@interpreted
def test_check_passes_right_values() -> None:
    module, specs = small()
    inputs = decode_inputs(specs["decode"], (0, 20, 32))
    assert bit_equal(module.decode(*inputs.positional, check=True), module.decode(*inputs.positional))
    inputs = prefill_inputs(specs["prefill"])
    assert bit_equal(module.prefill(*inputs.positional, check=True), module.prefill(*inputs.positional))


# Last, because a wrong address ends the process.


def far(shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A view of a buffer of more than 2^31 elements, few of whose pages of memory are ever touched."""
    return torch.empty(2**31 + 2**20, dtype=torch.bfloat16).as_strided(shape, strides)


@interpreted
def test_a_page_beyond_31_bits() -> None:
    module, _ = small()
    cache = far((2049, 16, 2, 16), (2**20, 32, 16, 1))
    cache[0], cache[2048] = 5.0, 3.0
    out, _ = module.decode(torch.zeros(1, 4, 16, dtype=torch.bfloat16), cache, cache, index(2048).view(1, 1), index(16))
    assert (out == 3.0).all()


@interpreted
def test_heads_and_tokens_beyond_31_bits() -> None:
    module, _ = small()
    query = torch.zeros(1, 4, 16, dtype=torch.bfloat16)
    cache = far((2, 16, 2, 16), (2**19, 16, 2**31, 1))
    cache[1, :, 0], cache[1, :, 1] = 3.0, 5.0
    heads = far((2, 2, 16), (16, 2**31, 1))
    heads[:, 0], heads[:, 1] = 3.0, 5.0
    for out, _ in (
        module.decode(query, cache, cache, index(1).view(1, 1), index(16)),
        module.prefill(query, heads, heads, index(0, 1), index(0, 2)),
    ):
        assert (out[:, :2] == 3.0).all() and (out[:, 2:] == 5.0).all()
    tokens = far((2, 2, 16), (2**31, 16, 1))
    tokens[0], tokens[1] = 3.0, 5.0
    assert (module.prefill(query, tokens, tokens, index(0, 1), index(0, 2))[0] == 4.0).all()


if __name__ == "__main__":
    main()
