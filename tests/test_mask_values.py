"""Masks, scores, sinks and params by hand: small inputs whose outputs are known without any reference.

Queries of zero weigh all visible keys alike; with the value at position j equal to j, the output is the mean of the
visible positions and lse the logarithm of their number.
"""

from __future__ import annotations

import functools
import math
import random
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dsl.expr.tiles import tile_range
from dsl.load import load
from dsl.pipeline import build
from tests.interpreted import Interpreted

INF = math.inf
DIM = 16
PREFILL = "query = packed kv = packed dtype = fp32 heads = 1 head_dim = 16 lse = true"
DECODE = "query = single kv = paged(block = 16) dtype = fp32 heads = 1 head_dim = 16 lse = true"
BLOCKS = {
    "plain": "",
    "without_row_1": "mask = q != 1",
    "causal": "mask = causal",
    "window3": "mask = causal and q - kv < 3",
    "window4": "mask = causal and q - kv < 4",
    "capped": "mask = causal  score = softcap(score, 1)",
    "scaled": "scale = 0.1  score = softcap(score, 2)",
    "sunk": "sink = 0.0",
    "sunk_window": "mask = causal and q - kv < 3  sink = 0.0",
    "sunk_capped": "mask = causal and q - kv < 3  sink = 0.0  score = softcap(score, 5)",
    "alibi": "score = score + 0.5 * (kv - q)",
    "thirds": "mask = (kv - q) // 3 == -1",
    "modulo": "score = score + (kv - q) % 3",
    "table": "param table[127] : fp32  mask = kv < 127  score = score + table[kv]",
    "one_line": "score = where(kv % 2 == 0, score + 1, max(score, 0.5)) - q * 0.25",
    "many_lines": """score = where(kv % 2 == 0,

        score + 1,   # a comment, and the blank line above
        max(score,
            0.5)) - q * 0.25""",
    "halved": "scale = 0.5",
    "custom": "score = score * 2 + 1",
    "unseen": "score = where(causal, score, log(0.0 * q_len))",
    "wrapping": "param far : int32  mask = kv - far < 0",
    "far_window": "param far : int32  mask = causal and q - kv < far",
    "by_zero": "param none : int32  mask = kv // none == 0 and kv % none == 0",
    "strided": "param bias[head, kv_token] : bf16  score = score + bias[h, kv_token]",
    "cut": "param near[kv_token] : int32  mask = near[kv_token + 1] == 0",
    "kept": "param keep[kv_token] : bool  mask = keep[kv_token]",
    "headed": "mask = causal",
}


def changed(fields: str, **changes: str) -> str:
    """A block's fields with others in their place."""
    for name, value in changes.items():
        fields = re.sub(rf"{name} = \S+", f"{name} = {value}", fields)
    return fields


OTHERS = f"""
attention alibi6_prefill {{ {changed(PREFILL, heads="6")} score = score + alibi(h) * (kv - q) }}
attention alibi12_prefill {{ {changed(PREFILL, heads="12")} score = score + alibi(h) * (kv - q) }}
attention alibi6_decode {{ {changed(DECODE, heads="6")} score = score + alibi(h) * (kv - q) }}
attention alibi12_decode {{ {changed(DECODE, heads="12")} score = score + alibi(h) * (kv - q) }}
attention padded_prefill {{ {changed(PREFILL, head_dim="80")} mask = causal }}
attention padded_decode {{ {changed(DECODE, head_dim="80")} mask = causal }}
attention low_prefill {{ {changed(PREFILL, dtype="bf16", head_dim="128")} mask = kv >= 0 or q < 0 }}
attention low_decode {{ {changed(DECODE, dtype="bf16", head_dim="128")} mask = kv < 9 }}
attention grouped_prefill {{ {changed(PREFILL, heads="6 / 2")} mask = causal }}
"""

interpreted = Interpreted("tests.test_mask_values")


@functools.cache
def module() -> ModuleType:
    """One module with a prefill and a decode of every block."""
    blocks = [f"attention {name}_prefill {{ {PREFILL} {fields} }}" for name, fields in BLOCKS.items()]
    blocks += [f"attention {name}_decode {{ {DECODE} {fields} }}" for name, fields in BLOCKS.items()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "values.attn"
        path.write_text("\n".join(blocks) + OTHERS)
        return load(build(path, folder))


def run(name: str, *arguments: Any, **params: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A function and its reference, which must agree."""
    function = getattr(module(), name)
    out, lse = function(*arguments, **params)
    by_reference = function.reference(*arguments, **params)
    torch.testing.assert_close(out, by_reference[0], rtol=2e-2 if out.dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    torch.testing.assert_close(lse, by_reference[1], rtol=1e-5, atol=1e-5)
    return out, lse


def positions(count: int, dim: int = DIM, heads: int = 1) -> torch.Tensor:
    """Values that are their positions, `[token, head, dim]`."""
    return torch.arange(count, dtype=torch.float32)[:, None, None].expand(count, heads, dim).contiguous()


def prefill(name: str, q_len: int, kv_len: int, q=None, k=None, v=None, **params) -> tuple[list[float], list[float]]:
    """One sequence of one head: the first element of each row, and its lse."""
    dim = DIM if v is None else v.size(-1)
    q = torch.zeros(q_len, 1, dim) if q is None else q
    k = torch.randn(kv_len, 1, dim) if k is None else k
    v = positions(kv_len) if v is None else v
    bounds = [torch.tensor([0, length], dtype=torch.int32) for length in (q_len, kv_len)]
    out, lse = run(f"{name}_prefill", q, k, v, *bounds, **params)
    return out[:, 0, 0].tolist(), lse[0].tolist()


def paged(tensor: torch.Tensor) -> torch.Tensor:
    """`[token, head, dim]` as `[block, slot, head, dim]`, what is left of the last page NaN."""
    missing = -len(tensor) % 16
    rest = torch.full((missing, *tensor.shape[1:]), math.nan, dtype=tensor.dtype)
    return torch.cat([tensor, rest]).unflatten(0, (-1, 16))


def decode(name: str, kv_len: int, q=None, k=None, v=None, **params) -> tuple[float, float]:
    """One sequence of one head: the first element of its row, and its lse."""
    dim = DIM if v is None else v.size(-1)
    q = torch.zeros(1, 1, dim) if q is None else q
    caches = paged(torch.randn(kv_len, 1, dim) if k is None else k), paged(positions(kv_len) if v is None else v)
    table = torch.arange(caches[0].size(0), dtype=torch.int32)[None]
    out, lse = run(f"{name}_decode", q, *caches, table, torch.tensor([kv_len], dtype=torch.int32), **params)
    return out[0, 0, 0].item(), lse[0, 0].item()


def near(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    assert found == pytest.approx(wanted, rel=tolerance, abs=tolerance), (found, wanted)


def values(*numbers: float, dim: int = DIM) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)[:, None, None].expand(len(numbers), 1, dim).contiguous()


def keys(*numbers: float, dim: int = DIM) -> torch.Tensor:
    """Keys whose first element alone is not zero."""
    result = torch.zeros(len(numbers), 1, dim)
    result[:, 0, 0] = torch.tensor(numbers)
    return result


@interpreted.mark
def test_a_row_whose_keys_are_all_masked_is_zero() -> None:
    """R01."""
    torch.manual_seed(1)
    tensors = {"q": torch.randn(3, 1, DIM), "k": torch.randn(3, 1, DIM), "v": torch.randn(3, 1, DIM)}
    out, lse = prefill("without_row_1", 3, 3, **tensors)
    plain, plain_lse = prefill("plain", 3, 3, **tensors)
    assert out[1] == 0.0 and lse[1] == -INF
    assert (out[0], out[2], lse[0], lse[2]) == (plain[0], plain[2], plain_lse[0], plain_lse[2])


@interpreted.mark
def test_causal_lines_up_at_the_end() -> None:
    """R02 and R08: more queries than keys, and fewer."""
    out, lse = prefill("causal", 5, 3)
    near(out, [0, 0, 0, 0.5, 1])
    near(lse, [-INF, -INF, 0, math.log(2), math.log(3)])
    out, lse = prefill("causal", 2, 5)
    near(out, [1.5, 2])
    near(lse, [math.log(4), math.log(5)])
    near(prefill("causal", 4, 12)[0], [4, 4.5, 5, 5.5])


@interpreted.mark
def test_a_window_counts_the_query_itself() -> None:
    """R09: three keys, in prefill and one by one."""
    wanted = [0, 0.5, 1, 2, 3, 4]
    out, lse = prefill("window3", 6, 6)
    near(out, wanted)
    near(lse, [math.log(count) for count in (1, 2, 3, 3, 3, 3)])
    near([decode("window3", length)[0] for length in range(1, 7)], wanted)


@interpreted.mark
def test_tiles_ahead_of_the_window_are_no_trouble() -> None:
    """R11."""
    out, _ = prefill("window4", 300, 300)
    near(out[3:], [row - 1.5 for row in range(3, 300)])
    near(decode("window4", 300)[0], 297.5)


@interpreted.mark
def test_the_tail_of_the_last_tile_does_not_count() -> None:
    """R13."""
    for name in ("plain", "causal"):
        for length, mean in ((1, 0), (15, 7), (17, 8), (127, 63), (129, 64)):
            near(prefill(name, 1, length)[0], [mean])
            near(decode(name, length)[0], mean)


@interpreted.mark
def test_a_cap_lets_no_masked_key_through() -> None:
    """R14."""
    assert prefill("capped", 2, 2, v=values(1, 0))[0][0] == 1.0


@interpreted.mark
def test_the_scale_comes_ahead_of_the_cap() -> None:
    """R15."""
    query = keys(100)
    near(prefill("scaled", 1, 2, query, keys(1, 0), values(1, 0))[0], [0.8808], 1e-4)
    near(decode("scaled", 2, query, keys(1, 0), values(1, 0))[0], 0.8808, 1e-4)


@interpreted.mark
def test_a_sink_counts_once_however_many_splits() -> None:
    """R17."""
    near(decode("sunk", 3), (0.75, math.log(4)))
    last = torch.zeros(4000, 1, DIM)
    last[-3:] = values(0, 1, 2)
    for name in ("sunk_window", "sunk_capped"):
        near(decode(name, 3), (0.75, math.log(4)))
        near(decode(name, 4000, v=last), (0.75, math.log(4)))
        near(prefill(name, 1, 4000, v=last)[0], [0.75])
    many = decode("sunk", 4000, v=torch.ones(4000, 1, DIM))
    near(many, (4000 / 4001, math.log(4001)))


@interpreted.mark
def test_a_sink_alone_is_the_lse_of_rows_without_keys() -> None:
    empty = torch.zeros(0, 1, DIM)
    assert prefill("sunk", 2, 0, k=empty, v=empty) == ([0, 0], [0, 0])
    assert prefill("sunk_window", 4, 2)[1][:2] == [0, 0]
    # Rows that no sequence owns have no sink.
    bounds = torch.tensor([1, 2], dtype=torch.int32)
    out, lse = run("sunk_prefill", torch.zeros(3, 1, DIM), torch.zeros(3, 1, DIM), positions(3), bounds, bounds)
    near(lse[0].tolist(), [-INF, math.log(2), -INF])
    near(out[:, 0, 0].tolist(), [0, 0.5, 0])


@interpreted.mark
def test_the_newest_key_has_no_distance() -> None:
    """R19."""
    near(decode("alibi", 3), (1.32016, 0.68027), 1e-4)
    near([each[-1] for each in prefill("alibi", 3, 3)], [1.32016, 0.68027], 1e-4)


@interpreted.mark
def test_slopes_of_head_counts_that_are_no_power_of_two() -> None:
    """R20: two keys of one step's distance show the slope, as the difference of their logarithms."""
    wanted = {
        6: [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125],
        12: [2.0**-exponent for exponent in range(1, 9)] + [0.707107, 0.353553, 0.176777, 0.088388],
    }
    bounds = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    for heads, slopes in wanted.items():
        query, key, value = torch.zeros(1, heads, DIM), torch.zeros(2, heads, DIM), positions(2, heads=heads)
        out, _ = run(f"alibi{heads}_prefill", query, key, value, *bounds)
        near(torch.logit(out[0, :, 0]).tolist(), slopes, 1e-4)
        table, length = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
        out, _ = run(f"alibi{heads}_decode", query, paged(key), paged(value), table, length)
        near(torch.logit(out[0, :, 0]).tolist(), slopes, 1e-4)


@interpreted.mark
def test_the_default_scale_is_that_of_the_true_head_dim() -> None:
    """R22."""
    query, key, value = keys(1, dim=80), keys(10, 0, dim=80), values(1, 0, dim=80)
    near(prefill("padded", 1, 2, query, key, value)[0], [0.7536], 1e-4)
    near(decode("padded", 2, query, key, value)[0], 0.7536, 1e-4)


@interpreted.mark
def test_every_option_reaches_both_kernels() -> None:
    """R23."""
    torch.manual_seed(3)
    tensors = [torch.randn(6, 1, DIM) for _ in range(3)]
    usual = prefill("plain", 6, 6, *tensors)[0][2]
    last = decode("plain", 6, tensors[0][5:], *tensors[1:])[0]
    for name in ("capped", "window3", "alibi", "sunk", "halved", "custom", "thirds"):
        assert abs(prefill(name, 6, 6, *tensors)[0][2] - usual) > 1e-3, name
        if name != "capped":
            assert abs(decode(name, 6, tensors[0][5:], *tensors[1:])[0] - last) > 1e-3, name


@interpreted.mark
def test_lse_is_a_natural_logarithm() -> None:
    """R25."""
    near(prefill("plain", 1, 4)[1], [1.386294])
    near(prefill("window4", 1, 4)[1], [1.386294])
    near(decode("window4", 9)[1], 1.386294)


@interpreted.mark
def test_logits_far_below_zero_are_logits_all_the_same() -> None:
    """R27."""
    query = torch.full((1, 1, 128), -43.75).bfloat16()
    key = torch.tensor([43.75, 44.0])[:, None, None].expand(2, 1, 128).contiguous().bfloat16()
    value = values(1, 0, dim=128).bfloat16()
    out, lse = prefill("low", 1, 2, query, key, value)
    assert out == [1.0] and abs(lse[0] + 21655) < 2
    out, lse = decode("low", 2, query, key, value)
    assert out == 1.0 and abs(lse + 21655) < 2


@interpreted.mark
def test_causal_is_the_same_for_every_head_of_a_group() -> None:
    """R34."""
    bounds = torch.tensor([0, 5], dtype=torch.int32)
    out, _ = run(
        "grouped_prefill", torch.zeros(5, 6, DIM), torch.randn(5, 2, DIM), positions(5, heads=2), bounds, bounds
    )
    for head in range(6):
        near(out[:, head, 0].tolist(), [0, 0.5, 1, 1.5, 2])


@interpreted.mark
def test_division_rounds_down() -> None:
    """R89: distances from -7 to 0 and beyond."""
    out, _ = prefill("thirds", 8, 8)
    wanted = []
    for row in range(8):
        seen = [key for key in range(8) if (key - row) // 3 == -1]
        wanted.append(sum(seen) / len(seen) if seen else 0)
    near(out, wanted)
    out, lse = prefill("modulo", 8, 8)
    for row in range(8):
        weights = [math.exp((key - row) % 3) for key in range(8)]
        near(lse[row], math.log(sum(weights)))
        near(out[row], sum(key * weight for key, weight in enumerate(weights)) / sum(weights))
    near(decode("thirds", 8)[0], 5)


@interpreted.mark
def test_an_expression_over_many_lines_is_that_of_one() -> None:
    """R92."""
    torch.manual_seed(5)
    tensors = [torch.randn(9, 1, DIM) for _ in range(3)]
    assert prefill("one_line", 9, 9, *tensors) == prefill("many_lines", 9, 9, *tensors)


@interpreted.mark
def test_tables_are_not_read_where_they_end() -> None:
    """R94: what lies behind the table would show."""
    numbers = torch.full((200,), math.nan)
    numbers[:127] = torch.linspace(-1, 1, 127)
    wanted = torch.softmax(numbers[:127], 0)
    mean = (wanted * torch.arange(127)).sum().item()
    for length in (127, 140):
        near(prefill("table", 1, length, table=numbers[:127])[0], [mean])
        near(decode("table", length, table=numbers[:127])[0], mean)


@interpreted.mark
def test_params_are_read_by_their_own_strides() -> None:
    bias = torch.tensor([[0.0, 9.0] * 5, [7.0] * 10]).bfloat16()
    wanted = torch.softmax(torch.zeros(5), 0) @ torch.arange(5.0)
    near(prefill("strided", 1, 5, bias=bias[:1, ::2])[0], [wanted.item()])
    near(decode("strided", 5, bias=bias[:1, ::2])[0], wanted.item())
    turned = torch.tensor([[1.0, 8.0], [2.0, 8.0], [3.0, 8.0]]).bfloat16().T[:1]
    wanted = torch.softmax(torch.tensor([1.0, 2.0, 3.0]), 0) @ torch.arange(3.0)
    near(prefill("strided", 1, 3, bias=turned)[0], [wanted.item()])


@interpreted.mark
def test_an_index_outside_a_param_reads_zero() -> None:
    """The last key asks for an element past the end, whose memory holds something else."""
    held = torch.tensor([5, 5, 0, 5, 7, 7], dtype=torch.int32)
    near(prefill("cut", 1, 4, near=held[:4])[0], [2])
    near(decode("cut", 4, near=held[:4])[0], 2)


@interpreted.mark
def test_a_mask_of_conditions_hides_what_it_says() -> None:
    keep = torch.tensor([True, False, True, True, False, True])
    value = positions(6)
    value[~keep] = math.nan
    near(prefill("kept", 3, 6, v=value, keep=keep)[0], [10 / 4] * 3)
    near(decode("kept", 6, v=value, keep=keep)[0], 10 / 4)


@interpreted.mark
def test_integers_wrap_and_claims_know_it() -> None:
    """`kv - far` wraps below 0 for the least integer, so that every key is visible."""
    near(prefill("wrapping", 2, 40, far=-(2**31))[1], [math.log(40)] * 2)
    near(prefill("wrapping", 1, 40, far=7)[0], [3])
    near(prefill("far_window", 40, 40, far=2**31 - 1)[0][39], 19.5)
    near(prefill("far_window", 50, 40, far=2**31 - 1)[1][:10], [-INF] * 10)
    near(decode("far_window", 40, far=2**31 - 1)[0], 19.5)
    near(decode("far_window", 40, far=3)[0], 38)
    assert decode("far_window", 40, far=0) == (0, -INF)


@interpreted.mark
def test_division_by_zero_gives_zero() -> None:
    near(prefill("by_zero", 1, 40, none=0)[0], [19.5])
    near(decode("by_zero", 40, none=0)[0], 19.5)
    near(prefill("by_zero", 1, 40, none=-1)[0], [0])


@interpreted.mark
def test_a_score_of_minus_infinity_hides_a_key() -> None:
    out, lse = prefill("unseen", 5, 3)
    near(out, [0, 0, 0, 0.5, 1])
    near(lse, [-INF, -INF, 0, math.log(2), math.log(3)])


PROBE = """

@triton.jit
def probe(lowers, uppers, out, kv_len, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.arange(0, ROWS)
    first, stop, first_full, stop_full = _tile_ranges(tl.load(lowers + rows), tl.load(uppers + rows), kv_len, BLOCK)
    first_key, last_key = _seen_keys(tl.load(lowers + rows), tl.load(uppers + rows), kv_len)
    tl.store(out, first)
    tl.store(out + 1, stop)
    tl.store(out + 2, first_full)
    tl.store(out + 3, stop_full)
    tl.store(out + 4, first_key)
    tl.store(out + 5, last_key)


@triton.jit
def probe_apart(bounds, out):
    first, stop, far_first, far_stop = _apart(
        tl.load(bounds), tl.load(bounds + 1), tl.load(bounds + 2), tl.load(bounds + 3)
    )
    tl.store(out, first)
    tl.store(out + 1, stop)
    tl.store(out + 2, far_first)
    tl.store(out + 3, far_stop)
"""


@functools.cache
def probes() -> ModuleType:
    """A module of masks with kernels that hand out what its functions compute."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probes.attn"
        path.write_text(f"attention streaming {{ {PREFILL} mask = causal and (q - kv < 20 or kv < 4) }}")
        module = Path(build(path, folder))
        module.write_text(module.read_text() + PROBE)
        return load(module)


@interpreted.mark
def test_the_kernel_visits_what_the_model_of_it_visits() -> None:
    """The claims that test_intervals holds against brute force are those of dsl.expr.tiles."""
    chance = random.Random(7)
    for _ in range(150):
        kv_len, block = chance.randrange(60), chance.choice((4, 8, 16))
        lowers = torch.tensor([chance.randrange(-40, 70) for _ in range(8)], dtype=torch.int32)
        uppers = torch.tensor([chance.randrange(-40, 70) for _ in range(8)], dtype=torch.int32)
        if chance.random() < 0.5:
            lowers, uppers = lowers.sort().values, uppers.sort().values
        out = torch.empty(6, dtype=torch.int32)
        probes().probe[(1,)](lowers, uppers, out, kv_len, 8, block)
        pairs = list(zip(lowers.tolist(), uppers.tolist(), strict=True))
        wanted = tile_range(pairs, kv_len, block)
        assert out[:4].tolist() == [wanted.first, wanted.stop, wanted.first_full, wanted.stop_full]
        seen = [key for key in range(kv_len) if any(lower <= key <= upper for lower, upper in pairs)]
        assert out[4:].tolist() == ([seen[0], seen[-1]] if seen else [kv_len, -1])


@interpreted.mark
def test_two_ranges_have_every_tile_once() -> None:
    chance = random.Random(8)
    for _ in range(150):
        ranges = [sorted((chance.randrange(12), chance.randrange(12))) for _ in range(2)]
        out = torch.empty(4, dtype=torch.int32)
        probes().probe_apart[(1,)](torch.tensor(ranges[0] + ranges[1], dtype=torch.int32), out)
        near, far = range(*out[:2].tolist()), range(*out[2:].tolist())
        assert sorted((*near, *far)) == sorted({*range(*ranges[0]), *range(*ranges[1])})
        assert near.stop <= far.start


@interpreted.mark
def test_what_a_launcher_says_of_params() -> None:
    bounds = torch.tensor([0, 1], dtype=torch.int32)
    tensors: Sequence[torch.Tensor] = (*(torch.zeros(1, 1, DIM) for _ in range(3)), bounds, bounds)
    strided, far = module().strided_prefill, module().far_window_prefill
    with pytest.raises(TypeError, match="bias"):
        strided(*tensors)
    with pytest.raises(TypeError, match=r"bias is torch.float32, not torch.bfloat16"):
        strided(*tensors, bias=torch.zeros(1, 1))
    with pytest.raises(ValueError, match=r"bias has shape \(2, 1\), not \[head, kv_token\] = \(1, 1\)"):
        strided(*tensors, bias=torch.zeros(2, 1).bfloat16())
    with pytest.raises(TypeError, match=r"bias is a list, not a tensor"):
        strided(*tensors, bias=[0])
    with pytest.raises(TypeError, match=r"far is a float, not a number of type int32"):
        far(*tensors, far=1.5)
    with pytest.raises(ValueError, match=r"far is 2147483648, which does not fit int32"):
        far(*tensors, far=2**31)
    with pytest.raises(TypeError, match="takes q, k, v"):
        far.reference(*tensors)


if __name__ == "__main__":
    interpreted.main()
