"""The oracle beside PyTorch's own attention and beside answers known without any code; its evaluator, by operator."""

from __future__ import annotations

import ast
import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dsl.check import load_spec
from dsl.expr.tree import Binary, Call, Constant, Expression, Index, Name, Unary
from dsl.source import Source
from dsl.spec import Case, Spec
from dsl.verify.cases import Adversity
from dsl.verify.evaluate import Scope, alibi_slopes, evaluate
from dsl.verify.inputs import make_inputs
from dsl.verify.layouts import to_logical, to_physical
from dsl.verify.oracle import oracle, oracle_rows, row_view
from tests.conftest import ROOT

X_SPLIT = "k_cache = [block, kv_head, dim/8, slot, dim%8]  v_cache = [block, kv_head, dim, slot]"


def spec_of(body: str) -> Spec:
    return load_spec(Source.from_text(f"attention f {{ {body} }}")).attentions[0]


def small(families: str, extra: str = "", heads: str = "4 / 2", dim: str = "16") -> Spec:
    query, kv = families.split()
    return spec_of(f"query = {query}  kv = {kv}  dtype = fp32  heads = {heads}  head_dim = {dim}  lse = true  {extra}")


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """PyTorch's attention in float64 over `[token, head, dim]`."""
    query, key, value = (tensor.double().transpose(0, 1)[None] for tensor in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)[0].transpose(0, 1)


# Beside PyTorch.


@pytest.mark.parametrize(
    "extra", ["", X_SPLIT, "k_cache = [block, kv_head, slot, dim]  v_cache = [block, kv_head, slot/8, dim, slot%8]"]
)
def test_decode_agrees_with_pytorch(extra: str) -> None:
    spec = small("single paged(block=16)", extra, dim="32 / 16")
    inputs = make_inputs(spec, Case((1, 1, 1), (1, 16, 45)))
    out, _ = oracle(spec, inputs)
    axes = ("block", "slot", "kv_head", "dim")
    keys = to_logical(inputs["k_cache"], spec.k_layout, axes).flatten(0, 1)
    values = to_logical(inputs["v_cache"], spec.v_layout, axes).flatten(0, 1)
    for row, length in enumerate((1, 16, 45)):
        position = torch.arange(length)
        slots = inputs["block_tables"][row, position // 16].long() * 16 + position % 16
        wanted = attention(inputs["query"][row : row + 1], keys[slots], values[slots])
        torch.testing.assert_close(out[row : row + 1], wanted)


def test_packed_batches_agree_with_pytorch() -> None:
    spec = small("packed packed", "mask = causal")
    inputs = make_inputs(spec, Case((5, 1, 9), (7, 3, 9)))
    out, lse = oracle(spec, inputs)
    assert lse.shape == (4, 15)
    query_bounds, key_bounds = inputs["cu_seqlens_q"].tolist(), inputs["cu_seqlens_k"].tolist()
    for row in range(3):
        queries = slice(query_bounds[row], query_bounds[row + 1])
        keys = slice(key_bounds[row], key_bounds[row + 1])
        q_len, kv_len = queries.stop - queries.start, keys.stop - keys.start
        mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
        wanted = attention(inputs["q"][queries], inputs["k"][keys], inputs["v"][keys], mask)
        torch.testing.assert_close(out[queries], wanted)


def test_dense_batches_agree_with_pytorch() -> None:
    spec = small("batched batched")
    inputs = make_inputs(spec, Case((5, 5), (12, 12)))
    out, lse = oracle(spec, inputs)
    assert lse.shape == (2, 4, 5)
    wanted = F.scaled_dot_product_attention(*(inputs[name].double() for name in "qkv"), enable_gqa=True)
    torch.testing.assert_close(out, wanted)


def test_shared_cache_reads_values_from_keys() -> None:
    spec = spec_of(
        "query = single  kv = paged(block = 8)  dtype = fp32  heads = 4 / 1  head_dim = 32 / 16"
        "  k_cache = [block, slot, dim]  v_cache = k_cache"
    )
    inputs = make_inputs(spec, Case((1,), (11,)))
    assert list(inputs) == ["query", "k_cache", "block_tables", "seq_lens"]
    keys = inputs["k_cache"][inputs["block_tables"][0].long()].flatten(0, 1)[:11, None]
    torch.testing.assert_close(oracle(spec, inputs)[0], attention(inputs["query"], keys, keys[..., :16]))


def test_rows_can_be_asked_for_singly() -> None:
    spec = small("packed paged(block=8)", "mask = causal")
    inputs = make_inputs(spec, Case((5, 9), (7, 20)), adversity=Adversity(poison=True))
    out, lse = oracle(spec, inputs)
    wanted = torch.tensor([0, 3, 7, 8, 18])
    some_out, some_lse = oracle_rows(spec, inputs, wanted)
    torch.testing.assert_close(some_out, row_view(spec, out, spec.out_layout)[wanted])
    torch.testing.assert_close(some_lse, lse.T[wanted])


def test_quantised_cache_is_read_with_its_scales() -> None:
    spec = spec_of(
        "query = single  kv = paged(block = 8)  dtype = bf16  heads = 4 / 2  head_dim = 16"
        "  kv_dtype = fp8_e4m3 per [kv_head]"
    )
    inputs = make_inputs(spec, Case((1,), (13,)))
    plain = dataclasses.replace(spec, kv_dtype="fp32", kv_scale_axes=None)
    dequantised = {name: inputs[name].float() * inputs[f"{name[0]}_scale"][:, None] for name in ("k_cache", "v_cache")}
    wanted, _ = oracle(plain, {**inputs, "k_scale": None, "v_scale": None, **dequantised})
    torch.testing.assert_close(oracle(spec, inputs)[0], wanted)
    as_bytes = {name: inputs[name].view(torch.uint8) for name in ("k_cache", "v_cache")}
    torch.testing.assert_close(oracle(spec, {**inputs, **as_bytes})[0], wanted)


# Answers that are known: with queries of zero every visible key weighs the same, and V counts positions.


def counting(q_len: int, kv_len: int, expressions: str, **params: object) -> tuple[list[float], list[float]]:
    """Out and lse of one sequence and one head with q = 0 and V[j] = j."""
    spec = small("packed packed", expressions, heads="1")
    position = torch.arange(float(kv_len))[:, None, None].expand(kv_len, 1, 16)
    arguments = {
        "q": torch.zeros(q_len, 1, 16),
        "k": torch.randn(kv_len, 1, 16),
        "v": position,
        "cu_seqlens_q": torch.tensor([0, q_len]),
        "cu_seqlens_k": torch.tensor([0, kv_len]),
        **params,
    }
    out, lse = oracle(spec, arguments)
    return out[:, 0, 0].tolist(), lse[0].tolist()


def test_more_queries_than_keys() -> None:
    out, lse = counting(5, 3, "mask = causal")
    assert out == [0, 0, 0, 0.5, 1]
    assert lse == pytest.approx([-math.inf, -math.inf, 0, math.log(2), math.log(3)])


def test_fewer_queries_than_keys() -> None:
    out, lse = counting(2, 5, "mask = causal")
    assert out == [1.5, 2] and lse == pytest.approx([math.log(4), math.log(5)])
    assert counting(4, 12, "mask = causal")[0] == pytest.approx([4, 4.5, 5, 5.5])


def test_window_counts_the_query_itself() -> None:
    assert counting(6, 6, "mask = 0 <= q - kv < 3")[0] == pytest.approx([0, 0.5, 1, 2, 3, 4])


def test_row_that_sees_nothing() -> None:
    out, lse = counting(3, 3, "mask = q != 1")
    assert out == [1, 0, 1] and lse[1] == -math.inf


def test_cap_comes_before_the_mask() -> None:
    assert counting(2, 2, "mask = causal  score = softcap(score, 1)")[0] == [0, 0.5]


def test_score_of_minus_infinity_is_unseen() -> None:
    assert counting(1, 4, "score = where(kv < 2, score, log(kv * 0.0))")[0] == [0.5]


@pytest.mark.parametrize("cap", ["", "score = softcap(score, 5)"])
def test_sink_counts_once(cap: str) -> None:
    out, lse = counting(1, 3, f"param sinks[head] : fp32  sink = sinks[h]  {cap}", sinks=torch.zeros(1))
    assert out == [0.75] and lse == pytest.approx([math.log(4)])


def test_sink_alone_gives_zero() -> None:
    sinks = torch.tensor([0.5])
    out, lse = counting(1, 3, "param sinks[head] : fp32  sink = sinks[h]  mask = kv < 0", sinks=sinks)
    assert out == [0] and lse == [0.5]


def test_alibi_is_zero_at_the_newest_key() -> None:
    out, lse = counting(1, 3, "score = score - 0.5 * (q - kv)")
    assert out == pytest.approx([1.32016], abs=1e-5) and lse == pytest.approx([0.68027], abs=1e-5)


def test_alibi_slopes() -> None:
    assert alibi_slopes(6) == pytest.approx([0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125])
    assert alibi_slopes(12)[7:] == pytest.approx([0.00390625, 0.707107, 0.353553, 0.176777, 0.088388], abs=1e-6)


def test_default_scale_is_that_of_the_true_dimension() -> None:
    spec = small("packed packed", heads="1", dim="80")
    query, key, value = torch.zeros(1, 1, 80), torch.zeros(2, 1, 80), torch.zeros(2, 1, 80)
    query[..., 0], key[0, ..., 0], value[0] = 10, 1, 1
    bounds = {"cu_seqlens_q": torch.tensor([0, 1]), "cu_seqlens_k": torch.tensor([0, 2])}
    out, _ = oracle(spec, {"q": query, "k": key, "v": value, **bounds})
    assert out[0, 0, 0].item() == pytest.approx(0.7536, abs=1e-4)


def test_very_negative_scores() -> None:
    spec = small("packed packed", heads="1", dim="128")
    keys = torch.tensor([43.75, 44.0])[:, None, None].expand(2, 1, 128)
    values = torch.tensor([1.0, 0.0])[:, None, None].expand(2, 1, 128)
    bounds = {"cu_seqlens_q": torch.tensor([0, 1]), "cu_seqlens_k": torch.tensor([0, 2])}
    out, lse = oracle(spec, {"q": torch.full((1, 1, 128), -43.75), "k": keys, "v": values, **bounds})
    assert out[0, 0, 0].item() == 1 and lse.item() == pytest.approx(-21655, abs=1)


def test_group_of_three_heads_shares_a_kv_head() -> None:
    spec = small("packed packed", heads="6 / 2")
    inputs = dict(make_inputs(spec, Case((5,), (5,))))
    inputs["v"] = torch.arange(2.0)[None, :, None].expand(5, 2, 16)
    wanted = torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.float64)[None, :, None].expand(5, 6, 16)
    torch.testing.assert_close(oracle(spec, inputs)[0], wanted)


# Lengths that do not fit.


def test_lengths_are_clamped_to_the_table() -> None:
    spec = small("single paged(block=8)")
    inputs = make_inputs(spec, Case((1, 1), (16, 5)))
    beyond = {**inputs, "seq_lens": torch.tensor([1000, 5])}
    torch.testing.assert_close(oracle(spec, beyond), oracle(spec, inputs))
    out, lse = oracle(spec, {**inputs, "seq_lens": torch.tensor([-3, 0])})
    assert not out.any() and bool((lse == -math.inf).all())


def test_bounds_are_clamped_and_rows_of_nobody_are_zero() -> None:
    spec = small("packed packed")
    inputs = make_inputs(spec, Case((6,), (6,)))
    bounds = {"cu_seqlens_q": torch.tensor([2, 5, 5]), "cu_seqlens_k": torch.tensor([-4, 3, 900])}
    out, lse = oracle(spec, {**inputs, **bounds})
    wanted = attention(inputs["q"][2:5], inputs["k"][:3], inputs["v"][:3])
    torch.testing.assert_close(out[2:5], wanted)
    assert not out[:2].any() and not out[5:].any() and bool((lse[:, 5] == -math.inf).all())


# The evaluator.


def value_of(expression: Expression, **names: Any) -> Any:
    tensors = {name: value for name, value in names.items() if isinstance(value, torch.Tensor)}
    return evaluate(expression, Scope(names, tensors, 8, torch.device("cpu"))).tolist()


def integer(value: int) -> Constant:
    return Constant(value, "int32")


@pytest.mark.parametrize(
    ("operator", "left", "right", "wanted"),
    [
        ("//", -8, 3, -3),
        ("%", -8, 3, 1),
        ("//", 8, -3, -3),
        ("%", 8, -3, -1),
        ("//", 7, 0, 0),
        ("%", 7, 0, 0),
        ("//", -(2**31), -1, -(2**31)),
        ("%", -(2**31), -1, 0),
        ("+", 2**31 - 1, 1, -(2**31)),
        ("*", 65536, 65536, 0),
    ],
)
def test_integers(operator: Any, left: int, right: int, wanted: int) -> None:
    assert value_of(Binary(operator, integer(left), integer(right), "int32")) == wanted


def test_int64_is_as_wide_as_it_says() -> None:
    assert value_of(Binary("*", Name("n", "int64"), integer(65536), "int64"), n=65536) == 2**32


def test_division_gives_a_float_even_by_zero() -> None:
    assert value_of(Binary("/", integer(1), integer(4), "float")) == 0.25
    assert value_of(Binary("/", integer(1), integer(0), "float")) == math.inf


def test_floats_overflow_as_fp32_does() -> None:
    assert value_of(Call("exp", (integer(100),), "float")) == math.inf
    assert value_of(Unary("-", Call("exp", (integer(100),), "float"), "float")) == -math.inf


@pytest.mark.parametrize(("index", "wanted"), [(-1, 0), (0, 3), (2, 5), (3, 0)])
def test_an_index_outside_a_param_reads_zero(index: int, wanted: int) -> None:
    table = torch.tensor([3, 4, 5], dtype=torch.int32)
    assert value_of(Index("table", (integer(index),), "int32"), table=table) == wanted


def test_calls() -> None:
    two, three = integer(2), integer(3)
    assert value_of(Call("min", (three, two, three), "int32")) == 2
    assert value_of(Call("max", (two, Constant(2.5, "float")), "float")) == 2.5
    assert value_of(Call("abs", (integer(-3),), "int32")) == 3
    assert value_of(Call("where", (Constant(False, "bool"), two, Constant(0.5, "float")), "float")) == 0.5
    assert value_of(Call("softcap", (three, two), "float")) == pytest.approx(2 * math.tanh(1.5))
    assert value_of(Call("alibi", (two,), "float")) == 0.125
    assert value_of(Call("sqrt", (integer(9),), "float")) == 3


def test_booleans() -> None:
    true, false = Constant(True, "bool"), Constant(False, "bool")
    assert value_of(Binary("and", true, Unary("not", false, "bool"), "bool")) is True
    assert value_of(Binary("or", false, Binary("<", integer(2), Constant(2.5, "float"), "bool"), "bool")) is True


# Layouts and independence.


@pytest.mark.parametrize(
    "layout",
    [
        "[block, kv_head, dim/8, slot, dim%8]",
        "[block, kv_head, slot/8, dim, slot%8]",
        "[block, slot, kv_head, dim]",
        "[kv_head, block, dim, slot]",
    ],
)
def test_a_layout_there_and_back(layout: str) -> None:
    spec = small("single paged(block=16)", f"k_cache = {layout}")
    axes = ("block", "slot", "kv_head", "dim")
    logical = torch.arange(3 * 16 * 2 * 16).reshape(3, 16, 2, 16)
    physical = to_physical(logical, spec.k_layout, axes)
    assert physical.is_contiguous() and physical.dim() == len(spec.k_layout)
    assert torch.equal(to_logical(physical, spec.k_layout, axes), logical)


def test_an_element_lies_where_the_axis_list_says() -> None:
    spec = small("single paged(block=16)", X_SPLIT)
    logical = torch.arange(3 * 16 * 2 * 16).reshape(3, 16, 2, 16)
    physical = to_physical(logical, spec.k_layout, ("block", "slot", "kv_head", "dim"))
    assert physical[2, 1, 11 // 8, 5, 11 % 8] == logical[2, 5, 1, 11]


@pytest.mark.parametrize("stem", ["oracle", "evaluate", "layouts", "sequences"])
def test_the_oracle_shares_nothing_with_the_kernels(stem: str) -> None:
    tree = ast.parse((ROOT / "dsl" / "verify" / f"{stem}.py").read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    ours = {name for name in imported if name.startswith("dsl")}
    assert all(name.startswith(("dsl.spec", "dsl.expr.tree", "dsl.verify.")) for name in ours), ours
