"""Bounds solved from masks, beside brute force: no tile that some row sees is passed over, no full one hides a key."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsl.check import load_spec
from dsl.expr.intervals import Interval, interval, known
from dsl.expr.tiles import Visit, tile_range, visible, visit
from dsl.expr.tree import Expression
from dsl.expr.values import Number, value
from dsl.expr.visible import most_keys, visible_ranges
from dsl.plan.prefill import surroundings
from dsl.source import Source
from dsl.spec import Spec
from tests.strategies import conditions, integers

PARAMS = "param slopes[head] : fp32  param window : int32  param flags[kv_head, 3] : bool  param doc[q_token] : int64"
SPAN, WIDTH = 24, 4
"""The positions of the small world of these tests, and its tiles."""


def spec_of(mask: str) -> Spec:
    fields = f"query = packed kv = packed dtype = bf16 heads = 4 / 2 head_dim = 64 {PARAMS} mask = {mask}"
    text = f"attention layer {{ {fields} }}"
    return load_spec(Source.from_text(text, "layer.attn")).attentions[0]


def world(q_len: int, kv_len: int, head: int, q_start: int, kv_start: int, window: int) -> tuple[list, list, Mapping]:
    """The names of each row, of each key, and of both."""
    common = {"h": head, "kv_head": head // 2, "b": 1, "q_len": q_len, "kv_len": kv_len, "window": window}
    common |= {"kv_start": kv_start}
    rows = [{"q": kv_len - q_len + row, "q_token": q_start + row} for row in range(q_len)]
    keys = [{"kv": key, "kv_token": kv_start + key} for key in range(kv_len)]
    return [{**common, **row} for row in rows], keys, common


def element(documents: list[int]):
    def read(param: str, indices: tuple[int, ...]) -> Number:
        if param == "doc":
            return documents[indices[0]] if 0 <= indices[0] < len(documents) else 0
        if param == "flags":
            inside = 0 <= indices[0] < 2 and 0 <= indices[1] < 3
            return (indices[0] + indices[1]) % 2 == 0 if inside else False
        return 0.5 if 0 <= indices[0] < 4 else 0.0

    return read


def claim(spec: Spec, rows: list, kv_len: int, kv_start: int, documents: list[int]) -> Visit:
    def elements_of(test, tile: int) -> list[int]:
        """Those of the aligned runs of tokens in which a tile lies."""
        begin = (kv_start + tile * WIDTH) // WIDTH * WIDTH
        end = (kv_start + tile * WIDTH + WIDTH - 1) // WIDTH * WIDTH + WIDTH
        return [int(read("doc", (token,))) for token in range(begin, end)]

    read = element(documents)
    ranges = visible_ranges(spec.mask, surroundings(spec).ranges)
    return visit(ranges, rows, kv_len, WIDTH, read, elements_of)


def check(spec: Spec, q_len: int, kv_len: int, head: int, starts: tuple[int, int], window: int, documents: list[int]):
    rows, keys, _ = world(q_len, kv_len, head, *starts, window)
    read = element(documents)
    pairs = [[visible(spec.mask, {**row, **key}, read) for key in keys] for row in rows]
    for first in range(0, q_len, WIDTH):
        tile_rows = slice(first, first + WIDTH)
        found = claim(spec, rows[tile_rows], kv_len, starts[1], documents)
        assert set(found.full) <= set(found.tiles)
        for tile in range(-(-kv_len // WIDTH)):
            seen = [row[tile * WIDTH : (tile + 1) * WIDTH] for row in pairs[tile_rows]]
            if tile not in found.tiles:
                assert not any(map(any, seen)), (tile, found)
            if tile in found.full:
                assert all(map(all, seen)) and len(seen[0]) == WIDTH, (tile, found)
        assert all(0 <= tile < -(-kv_len // WIDTH) for tile in found.tiles)


@settings(max_examples=250, deadline=None)
@given(
    mask=conditions(),
    q_len=st.integers(1, 11),
    kv_len=st.integers(0, SPAN),
    head=st.integers(0, 3),
    starts=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    window=st.one_of(st.integers(-3, 12), st.sampled_from((2**31 - 1, -(2**31), 2**31 - 9))),
    documents=st.lists(st.integers(-2, 3), min_size=0, max_size=30),
    is_sorted=st.booleans(),
)
def test_a_claim_about_a_tile_is_true(mask, q_len, kv_len, head, starts, window, documents, is_sorted) -> None:
    check(spec_of(mask), q_len, kv_len, head, starts, window, sorted(documents) if is_sorted else documents)


SOLVED = (
    "causal",
    "causal and q - kv < 5",
    "q - kv < window and kv - q < window",
    "abs(q - kv) <= 3",
    "q // 4 == kv // 4",
    "(q - 1) // 3 == kv // 3 and causal",
    "causal or kv < window",
    "causal and (q - kv < 3 or kv < 2)",
    "kv != q",
    "not (causal and kv > 2)",
    "h < 2 or causal",
    "causal and doc[q_token] == doc[kv_token]",
    "doc[kv_token] < doc[q_token]",
    "kv_token - q_token <= window",
    "2 * kv <= q + window",
    "max(kv, 3) <= q and min(kv, q) >= 1",
    "where(q % 2 == 0, causal, kv == q)",
)


@pytest.mark.parametrize("mask", SOLVED)
def test_masks_of_models_hold_in_small_worlds(mask: str) -> None:
    spec = spec_of(mask)
    for q_len, kv_len in product((1, 5, 9), (0, 3, 8, 22)):
        for window in (0, 2, 7, 2**31 - 1):
            check(spec, q_len, kv_len, 3, (1, 2), window, [0] * 5 + [1] * 9 + [2] * 20)


EXACT = (
    "causal",
    "causal and q - kv < 5",
    "abs(q - kv) <= 3",
    "q // 4 == kv // 4",
    "causal or kv < window",
    "causal and (q - kv < 3 or kv < 2)",
    "kv < 3 or kv >= 17",
    "causal and doc[q_token] == doc[kv_token]",
)


@pytest.mark.parametrize("mask", EXACT)
def test_solved_masks_visit_nothing_that_no_row_sees(mask: str) -> None:
    """And all tiles that all rows see are full."""
    spec = spec_of(mask)
    documents = [0] * 6 + [1] * 4 + [2] * 30
    for q_len, kv_len in product((1, 4, 9, 20), (1, 4, 12, 23)):
        rows, keys, _ = world(q_len, kv_len, 0, 0, 0, 6)
        read = element(documents)
        for first in range(0, q_len, WIDTH):
            tile_rows = rows[first : first + WIDTH]
            found = claim(spec, tile_rows, kv_len, 0, documents)
            for tile in range(-(-kv_len // WIDTH)):
                tile_keys = keys[tile * WIDTH : (tile + 1) * WIDTH]
                seen = [visible(spec.mask, {**row, **key}, read) for row in tile_rows for key in tile_keys]
                assert any(seen) == (tile in found.tiles), (q_len, kv_len, first, tile, found)


def test_causal_tiles_are_full_below_the_diagonal() -> None:
    spec = spec_of("causal")
    rows, _, _ = world(16, 16, 0, 0, 0, 0)
    assert claim(spec, rows[8:12], 16, 0, []) == Visit((0, 1, 2), (0, 1))
    negative, _, _ = world(16, 4, 0, 0, 0, 0)
    assert claim(spec, negative[8:12], 4, 0, []) == Visit((), ())
    assert claim(spec, negative[12:16], 4, 0, []) == Visit((0,), ())


def test_a_window_has_full_tiles_between_its_ends() -> None:
    spec = spec_of("causal and q - kv < 12")
    rows, _, _ = world(24, 24, 0, 0, 0, 0)
    assert claim(spec, rows[16:20], 24, 0, []) == Visit((1, 2, 3, 4), (2, 3))
    assert tile_range([(5, 16), (6, 17)], 24, 4).first_full == 2


@settings(max_examples=250, deadline=None)
@given(
    text=integers(),
    low=st.integers(-40, 40),
    width=st.integers(0, 6),
    window=st.sampled_from((0, 5, 2**31 - 1, -(2**31))),
)
def test_intervals_hold_every_value(text: str, low: int, width: int, window: int) -> None:
    spec = spec_of(f"{text} < 7")
    expression: Expression = spec.mask
    ranges = {"q": Interval(low, low + width), "kv": Interval(0, width), "window": Interval(window, window)}
    fixed = {"h": 1, "kv_head": 0, "b": 1, "q_token": 3, "kv_token": 4, "q_len": 5, "kv_len": 9, "window": window}
    ranges |= {name: Interval(number, number) for name, number in fixed.items()}
    truth = known(expression, ranges)
    for q, kv in product(range(low, low + width + 1), range(width + 1)):
        names = {**fixed, "q": q, "kv": kv}
        holds = bool(value(expression, names, element([1, 2, 3, 4, 5])))
        assert truth.may or not holds
        assert holds or not truth.must
        if hasattr(expression, "left"):
            part = expression.left  # type: ignore[union-attr]
            found = interval(part, ranges)
            assert found.low <= value(part, names, element([1, 2, 3, 4, 5])) <= found.high


@pytest.mark.parametrize(
    ("mask", "most"),
    [
        ("causal and q - kv < 128", 128),
        ("abs(q - kv) < 4", 7),
        ("causal", None),
        ("q // 256 == kv // 256", 256),
        ("causal and (q - kv < 100 or kv < 4)", 104),
        ("q - kv < window and causal", None),
        ("false", 0),
    ],
)
def test_how_many_keys_a_row_sees_at_most(mask: str, most: int | None) -> None:
    spec = spec_of(mask)
    ranges = surroundings(spec).ranges
    found = most_keys(visible_ranges(spec.mask, ranges), ranges)
    assert found == most
