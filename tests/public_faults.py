"""Small inputs that have broken attention kernels in public, and what they must give; a script for the interpreter.

Each function is a case: it returns nothing, or raises AssertionError. Unless a case says otherwise, queries are zeros,
so that all keys weigh the same, and V at position j is j: a row's result is the mean of the positions that it sees, and
its log-sum-exp the logarithm of their number.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from dsl.check import load_spec
from dsl.load import load
from dsl.plan import plan_module
from dsl.render import render
from dsl.source import Source

CASES: dict[str, Callable[[], None]] = {}
NAN = float("nan")


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


@functools.cache
def attend(fields: str) -> Callable:
    """The function of a block with these fields."""
    text = f"attention attend {{ {fields} }}"
    path = Path(tempfile.mkdtemp()) / "attend.py"
    path.write_text(render(plan_module(load_spec(Source.from_text(text, "attend.attn")))), encoding="utf-8")
    return load(path).attend


def decode(heads: str = "1", dim: int = 16, block: int = 16, dtype: str = "fp32", more: str = "lse = true") -> Callable:
    return attend(f"query = single kv = paged(block = {block}) dtype = {dtype} heads = {heads} head_dim = {dim} {more}")


def prefill(heads: str = "1", dim: int = 16, dtype: str = "fp32", more: str = "lse = true") -> Callable:
    return attend(f"query = packed kv = packed dtype = {dtype} heads = {heads} head_dim = {dim} {more}")


def starts(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def positions(tokens: int, heads: int = 1, dim: int = 16) -> torch.Tensor:
    """V at position j is j. [tokens, heads, dim]"""
    return torch.arange(tokens).float()[:, None, None].expand(tokens, heads, dim).contiguous()


def pages(values: torch.Tensor, block: int = 16) -> torch.Tensor:
    """A cache [block, slot, kv_head, dim] of one sequence's values, in order, its last slots NaN."""
    count = -(-values.size(0) // block)
    cache = values.new_full((count * block, *values.shape[1:]), NAN)
    cache[: values.size(0)] = values
    return cache.view(count, block, *values.shape[1:])


def near(tensor: torch.Tensor, wanted: object, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(
        tensor.float(), torch.as_tensor(wanted).float().expand_as(tensor), atol=tolerance, rtol=tolerance
    )


def refuses(kind: type[Exception], call: Callable[[], object], *words: str) -> None:
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), f"{error} does not say {words}"
    else:
        raise AssertionError(f"no {kind.__name__}")


@case
def R04_sequences_of_no_queries_are_left_out() -> None:
    function = prefill("9 / 3", 64)
    q, k, v = torch.randn(2, 9, 64), torch.randn(8, 3, 64), torch.randn(8, 3, 64)
    out, lse = function(q, k, v, torch.tensor([0, 1, 1, 2]), torch.tensor([0, 3, 3, 8]))
    for row, keys in ((0, slice(0, 3)), (1, slice(3, 8))):
        alone, alone_lse = function(q[row : row + 1], k[keys], v[keys], starts(1), starts(keys.stop - keys.start))
        near(out[row : row + 1], alone)
        near(lse[:, row : row + 1], alone_lse)


@case
def R06_a_batch_of_nothing_gives_nothing() -> None:
    cache = torch.zeros(1, 16, 1, 16)
    out, lse = decode("2 / 1")(
        torch.zeros(0, 2, 16), cache, cache, torch.zeros(0, 4, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    )
    assert out.shape == (0, 2, 16) and lse.shape == (2, 0) and out.dtype == torch.float32
    for cu_seqlens in (torch.tensor([0]), torch.tensor([0, 0])):
        empty = torch.zeros(0, 1, 16)
        out, lse = prefill()(empty, empty, empty, cu_seqlens, cu_seqlens)
        assert out.shape == (0, 1, 16) and lse.shape == (1, 0)


@case
def R07_padding_of_a_batch_is_zero_and_changes_nobody() -> None:
    function, query, cache = decode("4 / 2"), torch.randn(3, 4, 16), torch.randn(3, 16, 2, 16)
    table, lengths = torch.tensor([[0], [-1], [2]]), torch.tensor([5, 0, 3])
    out, lse = function(query, cache, cache, table, lengths)
    assert not out[1].any() and (lse[:, 1] == -math.inf).all()
    live = torch.tensor([0, 2])
    less, less_lse = function(query[live], cache, cache, table[live], lengths[live])
    assert out[live].equal(less) and lse[:, live].equal(less_lse)


@case
def R13_keys_past_the_last_tile_do_not_count() -> None:
    for keys in (1, 15, 17, 127, 129):
        values = positions(keys)
        out, lse = prefill()(torch.zeros(1, 1, 16), torch.randn(keys, 1, 16), values, starts(1), starts(keys))
        near(out, (keys - 1) / 2)
        near(lse, math.log(keys))
        cache = pages(values)
        table = torch.arange(cache.size(0))[None]
        out, lse = decode()(torch.zeros(1, 1, 16), cache, cache, table, torch.tensor([keys]))
        near(out, (keys - 1) / 2)
        near(lse, math.log(keys))


@case
def R22_the_scale_is_of_the_true_head_dimension() -> None:
    q, k, v = (torch.zeros(tokens, 1, 80) for tokens in (1, 2, 2))
    q[0, 0, 0], k[0, 0, 0], v[0] = 1.0, 10.0, 1.0
    near(prefill(dim=80)(q, k, v, starts(1), starts(2))[0], 0.7536, 1e-4)
    near(decode(dim=80)(q, pages(k), pages(v), torch.tensor([[0]]), torch.tensor([2]))[0], 0.7536, 1e-4)


@case
def R25_log_sum_exp_is_natural() -> None:
    keys = torch.randn(4, 1, 16)
    near(prefill()(torch.zeros(1, 1, 16), keys, keys, starts(1), starts(4))[1], 1.386294)
    near(decode()(torch.zeros(1, 1, 16), pages(keys), pages(keys), torch.tensor([[0]]), torch.tensor([4]))[1], 1.386294)


@case
def R27_rows_whose_scores_are_all_very_negative_are_rows() -> None:
    q = torch.full((1, 1, 128), -43.75).bfloat16()
    k = torch.tensor([43.75, 44.0])[:, None, None].expand(2, 1, 128).bfloat16()
    v = torch.tensor([1.0, 0.0])[:, None, None].expand(2, 1, 128).bfloat16().contiguous()
    out, lse = prefill(dim=128, dtype="bf16")(q, k, v, starts(1), starts(2))
    near(out, 1.0)
    near(lse, -245000 / math.sqrt(128), 1e-4)
    out, lse = decode(dim=128, dtype="bf16")(q, pages(k), pages(v), torch.tensor([[0]]), torch.tensor([2]))
    near(out, 1.0)
    near(lse, -245000 / math.sqrt(128), 1e-4)


@case
def R28_fp32_is_fp32() -> None:
    value = torch.full((1, 1, 16), 1 + 2.0**-12)
    assert (prefill()(torch.zeros(1, 1, 16), value, value, starts(1), starts(1))[0] == 1.000244140625).all()
    one = torch.tensor([[0]]), torch.tensor([1])
    assert (decode()(torch.zeros(1, 1, 16), pages(value), pages(value), *one)[0] == 1.000244140625).all()


@case
def R30_head_dimensions_that_are_no_power_of_two() -> None:
    for dim in (72, 80, 96, 112, 160, 192):

        def buffer(*shape: int, dim: int = dim) -> torch.Tensor:
            tensor = torch.full((*shape, dim + 16), NAN)
            tensor[..., :dim] = torch.randn(*shape, dim)
            return tensor[..., :dim]

        q, k, v, wide = buffer(5, 2), buffer(20, 1), buffer(20, 1), torch.full((5, 2, dim + 16), 7.0)
        wanted = (torch.einsum("qhd,kd->hqk", q.double(), k[:, 0].double()) * dim**-0.5).softmax(-1)
        wanted = torch.einsum("hqk,kd->qhd", wanted, v[:, 0].double())
        prefill("2 / 1", dim)(q, k, v, starts(5), starts(20), out=wide[..., :dim])
        near(wide[..., :dim], wanted)
        assert (wide[..., dim:] == 7.0).all()
        k_cache, v_cache = buffer(2, 16, 1), buffer(2, 16, 1)
        for cache, tensor in ((k_cache, k), (v_cache, v)):
            cache[0], cache[1, :4] = tensor[:16], tensor[16:]
        out, _ = decode("2 / 1", dim)(q[:1], k_cache, v_cache, torch.tensor([[0, 1]]), torch.tensor([20]))
        near(out, wanted[:1])


@case
def R32_any_ratio_of_heads() -> None:
    for heads, kv_heads in ((3, 1), (6, 2), (10, 2), (12, 2), (14, 2), (28, 4)):
        v = torch.arange(kv_heads).float()[None, :, None].expand(4, kv_heads, 16).contiguous()
        k, q = torch.randn(4, kv_heads, 16), torch.randn(1, heads, 16)
        wanted = (torch.arange(heads) // (heads // kv_heads))[None, :, None]
        near(prefill(f"{heads} / {kv_heads}")(q, k, v, starts(1), starts(4))[0], wanted)
        table, length = torch.tensor([[0]]), torch.tensor([4])
        near(decode(f"{heads} / {kv_heads}")(q, pages(k), pages(v), table, length)[0], wanted)


@case
def R37_small_dimensions_pages_and_batches() -> None:
    for block in (1, 8):
        cache = pages(positions(11, dim=8), block)
        out, lse = decode(dim=8, block=block)(
            torch.zeros(1, 1, 8), cache, cache, torch.arange(cache.size(0))[None], torch.tensor([11])
        )
        near(out, 5.0)
        near(lse, math.log(11))
    values = positions(1, dim=8) + 3
    near(prefill(dim=8)(torch.zeros(1, 1, 8), values, values, starts(1), starts(1))[0], 3.0)


@case
def R42_parts_of_one_projection() -> None:
    projection = torch.randn(33, (4 + 2 * 2) * 64)
    q, k, v = (part.view(33, -1, 64) for part in projection.split([256, 128, 128], 1))
    function = prefill("4 / 2", 64)
    cut = function(q, k, v, starts(33), starts(33))
    whole = function(q.contiguous(), k.contiguous(), v.contiguous(), starts(33), starts(33))
    assert cut[0].equal(whole[0]) and cut[1].equal(whole[1])


@case
def R44_keys_and_values_of_one_buffer() -> None:
    buffer, query = torch.randn(3, 2, 16, 2, 64), torch.randn(1, 4, 64)
    k, v = buffer.unbind(1)
    rest = torch.tensor([[2, 0, 1]]), torch.tensor([41])
    function = decode("4 / 2", 64)
    cut, whole = function(query, k, v, *rest), function(query, k.contiguous(), v.contiguous(), *rest)
    assert cut[0].equal(whole[0]) and cut[1].equal(whole[1])


@case
def R45_a_cache_in_another_order_of_axes() -> None:
    layout = "k_cache = [block, kv_head, slot, dim] v_cache = [block, kv_head, slot, dim] lse = true"
    query, rest = torch.randn(1, 4, 16), (torch.tensor([[0]]), torch.tensor([9]))
    tokens_first = torch.randn(1, 16, 4, 16)
    heads_first = decode("4", more=layout)
    refuses(
        ValueError,
        lambda: heads_first(query, tokens_first, tokens_first, *rest),
        "(1, 16, 4, 16)",
        "[block, kv_head, slot",
    )
    square = torch.randn(1, 16, 16, 16)
    query = torch.randn(1, 16, 16)
    permuted = decode("16", more=layout)(query, square.transpose(1, 2), square.transpose(1, 2), *rest)
    near(permuted[0], decode("16")(query, square, square, *rest)[0])


@case
def R47_results_in_half_of_a_buffer() -> None:
    cache, rest = torch.randn(40, 16, 2, 16), (torch.arange(40)[None], torch.tensor([640]))
    query, wide = torch.randn(1, 4, 16), torch.full((1, 4, 32), 7.0)
    function = decode("4 / 2")
    function(query, cache, cache, *rest, out=wide[..., :16])
    near(wide[..., :16], function(query, cache, cache, *rest)[0])
    assert (wide[..., 16:] == 7.0).all()
    wide = torch.full((5, 4, 32), 7.0)
    q, k = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
    prefill("4 / 2")(q, k, k, starts(5), starts(5), out=wide[..., :16])
    near(wide[..., :16], prefill("4 / 2")(q, k, k, starts(5), starts(5))[0])
    assert (wide[..., 16:] == 7.0).all()


@case
def R48_slots_that_were_never_written() -> None:
    split = "k_cache = [block, kv_head, dim/8, slot, dim%8] v_cache = [block, kv_head, dim, slot]"
    # The shapes of both caches, and which axis of each counts slots.
    for layout, shapes, axes in (
        ("", ((6, 16, 2, 16),) * 2, (1, 1)),
        (split, ((6, 2, 2, 16, 8), (6, 2, 16, 16)), (3, 3)),
    ):
        function = decode("4 / 2", dtype="fp16", more=f"{layout} lse = true")
        query, rest = torch.randn(1, 4, 16).half(), (torch.tensor([[4, 2]]), torch.tensor([17]))
        clean, dirty = [], []
        for shape, axis in zip(shapes, axes, strict=True):
            values = torch.randn(shape).half()
            live = torch.zeros(shape, dtype=torch.bool)
            live[4] = True
            live[2].select(axis - 1, 0).fill_(True)
            clean.append(values.where(live, 0.0))
            dirty.append(values.where(live, NAN))
        wanted = function(query, *clean, *rest)
        for k, v in ((dirty[0], clean[1]), (clean[0], dirty[1]), dirty):
            out, lse = function(query, k, v, *rest)
            assert out.equal(wanted[0]) and lse.equal(wanted[1])


@case
def R49_a_length_beyond_the_table() -> None:
    cache = torch.randn(3, 16, 1, 16)
    arguments = torch.zeros(1, 1, 16), cache, cache, torch.tensor([[1, 2]]), torch.tensor([33])
    refuses(ValueError, lambda: decode()(*arguments, check=True), "33", "32")
    near(decode()(*arguments)[1], math.log(32))


@case
def R53_types_that_do_not_match() -> None:
    q, k = torch.zeros(1, 1, 16).bfloat16(), torch.zeros(1, 1, 16).half()
    rest = starts(1), starts(1)
    refuses(TypeError, lambda: prefill(dtype="bf16")(q, k, k, *rest), "torch.bfloat16", "torch.float16")
    refuses(TypeError, lambda: prefill(dtype="bf16")(q.float(), q, q, *rest), "torch.bfloat16", "torch.float32")
    page = k[:, None].expand(1, 16, 1, 16)
    refuses(
        TypeError,
        lambda: decode(dtype="bf16")(q, page, page, torch.tensor([[0]]), torch.tensor([1])),
        "torch.bfloat16",
        "torch.float16",
    )


@case
def R56_more_splits_than_keys() -> None:
    cache = torch.full((513, 16, 1, 16), 2.0)
    cache[512] = 1.0
    table = torch.zeros(2, 512, dtype=torch.int32)
    table[0], table[1] = 512, torch.arange(512)
    for more in ("lse = true", "lse = true split = fixed(64)"):
        out, lse = decode(more=more)(torch.zeros(2, 1, 16), cache, cache, table, torch.tensor([1, 8192]))
        assert (out[0] == 1.0).all() and (out[1] == 2.0).all()
        near(lse, [[0.0, math.log(8192)]])


@case
def R58_a_fixed_split_has_no_batch_mates() -> None:
    function = decode("4 / 2", more="lse = true split = fixed(64)")
    query, cache = torch.randn(16, 4, 16), torch.randn(20, 16, 2, 16)
    table = torch.stack([torch.randperm(20) for _ in range(16)])
    lengths = torch.tensor([300, *range(1, 16)])
    alone = function(query[:1], cache, cache, table[:1], lengths[:1])
    for size in (1, 2, 16):
        out, lse = function(query[:size], cache, cache, table[:size], lengths[:size])
        assert out[:1].equal(alone[0]) and lse[:, :1].equal(alone[1])


def main() -> None:
    """Run all cases, and print what went wrong, by case, as JSON."""
    from dsl.verify.interpreter import repair

    repair()
    found: dict[str, str | None] = {}
    for name, function in CASES.items():
        torch.manual_seed(0)
        try:
            function()
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
