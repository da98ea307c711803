"""Which tiles of keys a tile of rows visits: the arithmetic of the kernels, in plain Python, for pictures and proof."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dsl.expr.intervals import Interval, known
from dsl.expr.tree import Binary, Constant, Expression, Name
from dsl.expr.values import Element, Number, value
from dsl.expr.visible import LAST_KEY, Alternatives, ElementTest, combined


@dataclass(frozen=True, slots=True)
class TileRange:
    """Tiles from `first` to before `stop` are visited, those from `first_full` to before `stop_full` without a test."""

    first: int
    stop: int
    first_full: int
    stop_full: int


@dataclass(frozen=True, slots=True)
class Visit:
    """What a tile of rows visits: `tiles` of keys, of which `full` need no test."""

    tiles: tuple[int, ...]
    full: tuple[int, ...]


def tile_range(bounds: Sequence[tuple[int, int]], kv_len: int, block: int) -> TileRange:
    """From the first and the last key of each row to tiles of `block` keys."""
    clamped = [(min(max(lower, 0), kv_len), max(min(upper, kv_len - 1), -1)) for lower, upper in bounds]
    seeing = [(lower, upper) for lower, upper in clamped if lower <= upper]
    stop = (max((upper for _, upper in seeing), default=-1) + block) // block
    first = min(min((lower for lower, _ in seeing), default=kv_len) // block, stop)
    first_full = min(max((max(lower for lower, _ in clamped) + block - 1) // block, first), stop)
    stop_full = max(min((min(upper for _, upper in clamped) + 1) // block, stop), first_full)
    return TileRange(first, stop, first_full, stop_full)


def visit(
    ranges: Alternatives,
    rows: Sequence[Mapping[str, Number]],
    kv_len: int,
    block: int,
    element: Element,
    elements_of: Callable[[ElementTest, int], Sequence[int]] | None = None,
) -> Visit:
    """What the kernel visits for rows of these names; `elements_of` gives the elements that bound a tile's."""
    found = []
    for each in ranges:
        lower = combined("max", each.lowers) if each.lowers else Constant(0, "int32")
        upper = combined("min", each.uppers) if each.uppers else Constant(LAST_KEY, "int32")
        bounds = [(int(value(lower, names, element)), int(value(upper, names, element))) for names in rows]
        one = tile_range(bounds, kv_len, block)
        if each.tests and elements_of is not None:
            one = _scanned(one, each.tests, rows, element, elements_of)
        full = range(one.first_full, one.stop_full) if each.exact else range(0)
        found.append((range(one.first, one.stop), full))
    tiles = sorted({tile for visited, _ in found for tile in visited})
    longest = max((full for _, full in found), key=len, default=range(0))
    return Visit(tuple(tiles), tuple(longest))


def _scanned(
    one: TileRange,
    tests: Sequence[ElementTest],
    rows: Sequence[Mapping[str, Number]],
    element: Element,
    elements_of: Callable[[ElementTest, int], Sequence[int]],
) -> TileRange:
    """The range narrowed by the least and the greatest element of each tile."""
    may, must = [], []
    for tile in range(one.first, one.stop):
        truths = []
        for test in tests:
            wanted = [int(value(test.value, names, element)) for names in rows]
            held = elements_of(test, tile)
            comparison = Binary(test.operator, Name("held", "int64"), Name("wanted", "int64"), "bool")  # type: ignore[arg-type]
            names = {"held": Interval(min(held), max(held)), "wanted": Interval(min(wanted), max(wanted))}
            truths.append(known(comparison, names))
        may.append(all(truth.may for truth in truths))
        must.append(all(truth.must for truth in truths))
    seen = [one.first + place for place, holds in enumerate(may) if holds]
    stop = max(seen, default=one.first - 1) + 1
    first = min(seen, default=stop)
    certain = must.index(True) if any(must) else len(must)
    gap = must.index(False, certain) if False in must[certain:] else len(must)
    first_full = min(max(one.first_full, one.first + certain, first), stop)
    stop_full = max(min(one.stop_full, one.first + gap, stop), first_full)
    return TileRange(first, stop, first_full, stop_full)


def visible(mask: Expression, names: Mapping[str, Number], element: Element) -> bool:
    """Whether a row sees a key."""
    return bool(value(mask, names, element))
