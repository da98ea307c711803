"""Packed queries over a paged cache: every layout against the oracle, and what must not matter in a batch."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dsl.check import load_spec
from dsl.load import load
from dsl.pipeline import build, read_source
from dsl.spec import Case, Spec
from dsl.verify.cases import Adversity
from dsl.verify.inputs import Inputs, make_inputs
from dsl.verify.oracle import oracle
from dsl.verify.runner import verify_files
from tests.interpreted import Interpreted

BASE = "query = packed  kv = paged(block = 16)  dtype = fp16  heads = 6 / 2  head_dim = 32  lse = true"
BLOCKS = {
    "all_keys": "kv = paged(block = 8)  scale = -0.3  lse = false",
    "x_split": "k_cache = [block, kv_head, dim/8, slot, dim%8]  v_cache = [block, kv_head, dim, slot]",
    "shuffled": """
        mask = causal  k_cache = [block, kv_head, dim/8, slot, dim%8]  v_cache = [block, kv_head, slot/8, dim, slot%8]
    """,
    "single_slots": """
        kv = paged(block = 1)  mask = 0 <= q - kv < 20
        k_cache = [block, kv_head, slot, dim]  v_cache = [block, kv_head, slot, dim]
    """,
    "one_kv_head": """
        kv = paged(block = 24)  dtype = bf16  heads = 7 / 1  head_dim = 40 / 24  mask = causal
        k_cache = [block, slot, dim]  v_cache = [block, dim, slot]
    """,
    "large_pages": """
        kv = paged(block = 544)  mask = causal and (q - kv < 33 or kv < 5)
        k_cache = [block, kv_head, dim, slot]  v_cache = [block, kv_head, dim, slot]
    """,
    "heads_first": """
        dtype = fp32  head_dim = 72  heads = 40 / 2  mask = causal  q = [head, q_token, dim]  out = [head, q_token, dim]
    """,
    "expressions": """
        param sinks[head] : fp32  param bias[head, 40] : bf16  param n : int32
        param doc[q_token] : int32  param ids[kv_token] : int32  param keep[kv_token] : bool
        mask  = causal and (doc[q_token] == ids[kv_token] or kv % 3 == q % n) and not (keep[kv_token] and kv % 5 == 2)
        score = softcap(score, 5) + bias[h, q - kv + 20] + alibi(h) * (kv - q) / 100
        sink  = sinks[h]
    """,
    "numbers": "query = packed(max = 4)  param s : fp32  scale = s  sink = 1.5  mask = kv < kv_len - 3",
}
SMALL = """
attention chunked {
    query = packed  kv = paged(block = 16)  dtype = bf16  heads = 4 / 2  head_dim = 16  lse = true  mask = causal
}
attention decode from chunked { query = single }
attention all_keys from chunked { mask = true }
"""
MIXED = Case((1, 33, 0, 4, 70, 1), (40, 80, 20, 4, 70, 90))
FEW = Case((1, 2, 0, 4), (40, 17, 48, 3))


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_passes(name: str, tmp_path: Path) -> None:
    spec = tmp_path / "paged.attn"
    spec.write_text(f"attention base {{ {BASE} }}\nattention {name} from base {{ {BLOCKS[name]} }}")
    report = verify_files([spec], device="cpu", only=[name])
    assert report.passed, report.failures
    assert {row.function for row in report.rows} == {name, f"{name}.reference"}


# What must not matter in a batch.

interpreted = Interpreted("tests.test_paged")
RIGHT = 1e-2


@functools.cache
def small() -> tuple[ModuleType, dict[str, Spec]]:
    """The module of SMALL, and its specs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.attn"
        path.write_text(SMALL)
        return load(build(path, folder)), {spec.name: spec for spec in load_spec(read_source(path)).attentions}


def example(case: Case, name: str = "chunked", adversity: Adversity | None = None) -> Inputs:
    return make_inputs(small()[1][name], case, adversity=adversity or Adversity())


def index(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def are_equal(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def assert_right(name: str, arguments: dict[str, torch.Tensor], found: tuple[torch.Tensor, torch.Tensor]) -> None:
    out, lse = oracle(small()[1][name], arguments)
    assert (found[0].double() - out).abs().max() < RIGHT
    torch.testing.assert_close(found[1].double(), lse, atol=1e-4, rtol=1e-4)


def refuses(words: str, **arguments: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=words):
        small()[0].chunked(**arguments, check=True)


@interpreted.mark
def test_low_and_high_tiles_are_right() -> None:
    module, _ = small()
    low = module._chunked_block.configs["low"]["BLOCK_Q"]
    for case in (FEW, MIXED):
        for name in ("chunked", "all_keys"):
            arguments = dict(example(case, name).arguments)
            assert_right(name, arguments, getattr(module, name)(**arguments))
    assert 2 * sum(FEW.q_lens) <= low * len(FEW.q_lens) and 2 * sum(MIXED.q_lens) > low * len(MIXED.q_lens)


@interpreted.mark
def test_a_sequence_does_not_depend_on_the_others() -> None:
    module, _ = small()
    arguments = dict(example(MIXED).arguments)
    out, lse = module.chunked(**arguments)
    starts = arguments["cu_seqlens_q"].tolist()
    for seq in range(len(starts) - 1):
        rows = slice(starts[seq], starts[seq + 1])
        alone = {
            **arguments,
            "q": arguments["q"][rows],
            "cu_seqlens_q": index(0, rows.stop - rows.start),
            "block_tables": arguments["block_tables"][seq : seq + 1],
            "seq_lens": arguments["seq_lens"][seq : seq + 1],
        }
        found = module.chunked(**alone)
        torch.testing.assert_close(found[0], out[rows], atol=RIGHT, rtol=0)
        torch.testing.assert_close(found[1], lse[:, rows], atol=1e-4, rtol=1e-4)


@interpreted.mark
def test_single_tokens_are_a_decode() -> None:
    module, _ = small()
    arguments = dict(example(Case((1, 1, 1), (40, 17, 80)), "decode").arguments)
    right = module.decode(**arguments)
    named = {"q" if name == "query" else name: tensor for name, tensor in arguments.items()}
    out, lse = module.chunked(**named, cu_seqlens_q=index(0, 1, 2, 3))
    torch.testing.assert_close(out, right[0], atol=RIGHT, rtol=0)
    torch.testing.assert_close(lse, right[1], atol=1e-4, rtol=1e-4)


@interpreted.mark
def test_lengths_are_clamped() -> None:
    module, _ = small()
    arguments = dict(example(Case((3, 4, 2, 2), (40, 48, 0, 0))).arguments)
    right = module.chunked(**arguments)
    assert_right("chunked", arguments, right)
    assert (right[0][7:] == 0).all() and (right[1][:, 7:] == -torch.inf).all()
    for lengths in (index(40, 2**31 - 1, -1, -(2**31)), torch.tensor([40, 2**40 + 1, -(2**40), -1])):
        assert are_equal(module.chunked(**{**arguments, "seq_lens": lengths}), right)


@interpreted.mark
def test_indices_of_64_bits_and_with_strides() -> None:
    module, _ = small()
    arguments = dict(example(MIXED).arguments)
    right = module.chunked(**arguments)
    wide = {name: arguments[name].long() for name in ("cu_seqlens_q", "block_tables", "seq_lens")}
    assert are_equal(module.chunked(**{**arguments, **wide}), right)
    spread = {
        name: torch.stack([arguments[name], arguments[name] + 9], 1)[:, 0] for name in ("cu_seqlens_q", "seq_lens")
    }
    spread["block_tables"] = torch.cat([wide["block_tables"], wide["block_tables"] + 99], 1)
    spread["block_tables"] = spread["block_tables"][:, : wide["block_tables"].size(1)]
    assert are_equal(module.chunked(**{**arguments, **spread}), right)


@interpreted.mark
def test_out_is_written_and_nothing_beside_it() -> None:
    module, _ = small()
    inputs = example(MIXED, adversity=Adversity(views="odd"))
    rows = inputs["q"].size(0)
    buffer = torch.full((rows + 1, 5, 24), 7.0, dtype=torch.bfloat16)
    lse_buffer = torch.full((6, rows + 2), 7.0)
    out, lse = buffer[1:, :4, 8:], lse_buffer[1:5, 1:-1]
    result = module.chunked(*inputs.positional, out=out, out_lse=lse)
    assert result[0] is out and result[1] is lse
    assert_right("chunked", dict(inputs.arguments), result)
    out.fill_(7.0)
    lse.fill_(7.0)
    assert (buffer == 7.0).all() and (lse_buffer == 7.0).all()


@interpreted.mark
def test_rows_of_no_sequence_and_sequences_of_no_key_are_zero() -> None:
    module, _ = small()
    arguments = dict(example(Case((5, 40), (30, 60))).arguments)
    inner = {**arguments, "cu_seqlens_q": index(3, 5, 30)}
    found = module.chunked(**inner)
    assert_right("chunked", inner, found)
    for rows in (slice(0, 3), slice(30, 45)):
        assert (found[0][rows] == 0).all() and (found[1][:, rows] == -torch.inf).all()
    nobody = {"cu_seqlens_q": index(0), "block_tables": index().view(0, 0), "seq_lens": index()}
    no_table = {"block_tables": arguments["block_tables"][:, :0]}
    no_pages = {**no_table, "k_cache": arguments["k_cache"][:0], "v_cache": arguments["v_cache"][:0]}
    for some in (nobody, no_table, no_pages):
        out, lse = module.chunked(**{**arguments, **some})
        assert out.shape == (45, 4, 16) and (out == 0).all() and (lse == -torch.inf).all()
    out, lse = module.chunked(**{**arguments, "q": arguments["q"][:0]})
    assert out.shape == (0, 4, 16) and lse.shape == (4, 0)


@interpreted.mark
def test_bounds_outside_of_the_tensors() -> None:
    module, _ = small()
    arguments = dict(example(Case((40,), (60,))).arguments)
    right = module.chunked(**arguments)
    beyond = {"cu_seqlens_q": torch.tensor([-(2**40), 2**40])}
    assert are_equal(module.chunked(**{**arguments, **beyond}), right)
    three = {"block_tables": arguments["block_tables"].expand(3, -1), "seq_lens": arguments["seq_lens"].expand(3)}
    zeros = {"out": torch.zeros_like(right[0]), "out_lse": torch.zeros_like(right[1])}
    for starts in ([9, 3, 20, 5], [-5, 40, -7, 99], [30, 20, 10, 0]):  # no order: no row has a meaning
        out, _ = module.chunked(**{**arguments, **three, "cu_seqlens_q": index(*starts)}, **zeros)
        assert out.isfinite().all()


@interpreted.mark
def test_values_are_checked_where_the_caller_asks() -> None:
    module, _ = small()
    arguments = dict(example(Case((3, 4), (40, 20))).arguments)
    assert are_equal(module.chunked(**arguments, check=True), module.chunked(**arguments))
    refuses(r"cu_seqlens_q\[1\] is 9, not from 0 to 7", **{**arguments, "cu_seqlens_q": index(0, 9, 7)})
    refuses(r"cu_seqlens_q\[2\] is 2, not from 3 to 7", **{**arguments, "cu_seqlens_q": index(0, 3, 2)})
    refuses(r"seq_lens\[1\] is 49, block_tables\[1\] holds 48 keys", **{**arguments, "seq_lens": index(40, 49)})
    tables = arguments["block_tables"].clone()
    tables[1, 1] = 77
    refuses(r"block_tables\[1\] has page 77", **{**arguments, "block_tables": tables})
    refuses("cu_seqlens_q is empty", **{**arguments, "cu_seqlens_q": index()})
    refuses("block_tables has shape", **{**arguments, "block_tables": tables[:1]})


def far(shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A view of a buffer of more than 2^31 elements, few of whose pages of memory are ever touched."""
    return torch.empty(2**31 + 2**20, dtype=torch.bfloat16).as_strided(shape, strides)


# Last, because a wrong address ends the process.


@interpreted.mark
def test_pages_and_heads_beyond_31_bits() -> None:
    module, _ = small()
    q = torch.zeros(3, 4, 16, dtype=torch.bfloat16)
    pages = far((2049, 16, 2, 16), (2**20, 32, 16, 1))
    pages[0], pages[2048] = 5.0, 3.0
    out, _ = module.chunked(q, pages, pages, index(0, 3), index(2048).view(1, 1), index(16))
    assert (out == 3.0).all()
    heads = far((2, 16, 2, 16), (2**19, 16, 2**31, 1))
    heads[1, :, 0], heads[1, :, 1] = 3.0, 5.0
    out, _ = module.chunked(q, heads, heads, index(0, 3), index(1).view(1, 1), index(16))
    assert (out[:, :2] == 3.0).all() and (out[:, 2:] == 5.0).all()
    slots = far((1, 16, 2, 16), (2**31, 2**27, 16, 1))
    slots[0] = 3.0
    out, _ = module.chunked(q, slots, slots, index(0, 3), index(0).view(1, 1), index(16))
    assert (out == 3.0).all()


if __name__ == "__main__":
    interpreted.main()
