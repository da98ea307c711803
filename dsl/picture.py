"""A mask as a picture: which pairs of a query and a key are visible, and which tiles a kernel visits.

Everything is placed here; the template `mask.svg.jinja` prints it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dsl.expr.tiles import Visit, visible, visit
from dsl.expr.values import Number
from dsl.expr.visible import ElementTest
from dsl.plan.module import BlockPlan
from dsl.render import environment
from dsl.spec import Param, Spec

CELL = 8
LEFT, TOP, RIGHT, LINE = 64, 84, 20, 18
MOST_CELLS = 400_000


class PictureError(Exception):
    """The picture cannot be drawn as asked. The message says why."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in pixels."""

    x: int
    y: int
    width: int
    height: int
    title: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    x: int
    y: int
    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    """All that is drawn: runs of visible pairs, and tiles that are visited with a test, and without."""

    width: int
    height: int
    title: tuple[Label, ...]
    frame: Box
    visible: tuple[Box, ...]
    partial: tuple[Box, ...]
    full: tuple[Box, ...]
    labels: tuple[Label, ...]
    legend: tuple[Label, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths of the one sequence that is drawn, and of a tile of rows and of keys."""

    q_len: int
    kv_len: int
    block_q: int
    block_kv: int


@dataclass(frozen=True, slots=True)
class _Row:
    """The names of one drawn row, and how many keys there are for it."""

    names: Mapping[str, Number]
    kv_len: int


def mask_svg(block: BlockPlan, sizes: Sizes, given: Mapping[str, Sequence[Number]]) -> str:
    """The picture of a block's mask. Raises PictureError."""
    return environment().get_template("mask.svg.jinja").render(picture=picture(block, sizes, given))


def picture(block: BlockPlan, sizes: Sizes, given: Mapping[str, Sequence[Number]]) -> Picture:
    """Place everything. `given` holds values of params; a tensor's values are spread over its elements in runs."""
    spec = block.spec
    if sizes.q_len * sizes.kv_len > MOST_CELLS:
        raise PictureError(f"{sizes.q_len} x {sizes.kv_len} pairs are too many to draw; at most {MOST_CELLS}")
    unknown = sorted(given.keys() - {param.name for param in spec.params})
    if unknown:
        raise PictureError(f"{spec.name} has no param {', '.join(unknown)}")
    params = {param.name: tuple(given.get(param.name) or _usual(param, sizes)) for param in spec.params}
    element = _Elements(spec, params, sizes)
    rows = list(_rows(spec, sizes, params))
    shown = [_runs(spec, row, element) for row in rows]
    height = sizes.block_q if spec.query != "single" else 1
    partial: list[Box] = []
    full: list[Box] = []
    for first in range(0, len(rows), height):
        one = _visit(block, rows[first : first + height], sizes, element)
        count = min(height, len(rows) - first)
        for tile in one.tiles:
            keys = min(sizes.block_kv, rows[first].kv_len - tile * sizes.block_kv)
            kind, chosen = ("full", full) if tile in one.full else ("partial", partial)
            name = f"rows {first} to {first + count - 1}, tile {tile}: {kind}"
            chosen.append(_box(tile * sizes.block_kv, first, keys, count, name))
    tiles = -(-len(rows) // height) * -(-sizes.kv_len // sizes.block_kv)
    return _placed(block, sizes, rows, shown, partial, full, tiles, params)


def _placed(
    block: BlockPlan,
    sizes: Sizes,
    rows: list[_Row],
    shown: list[list[tuple[int, int]]],
    partial: list[Box],
    full: list[Box],
    tiles: int,
    params: Mapping[str, Sequence[Number]],
) -> Picture:
    spec = block.spec
    frame = _box(0, 0, sizes.kv_len, len(rows))
    seen = tuple(_box(first, row, last - first, 1) for row, runs in enumerate(shown) for first, last in runs)
    pairs = sum(last - first for runs in shown for first, last in runs)
    assumed = "; ".join(f"{name} = {_list(values)}" for name, values in params.items())
    lines = [
        f"{spec.name}: {pairs} of {len(rows) * sizes.kv_len} pairs are visible",
        f"tiles of {sizes.block_q} x {sizes.block_kv}: {len(full)} full, {len(partial)} partial, "
        f"{tiles - len(full) - len(partial)} empty of {tiles}",
        f"for head 0{f'; {assumed}' if assumed else ''}",
    ]
    if spec.query == "single":
        lines[1] = f"tiles of {sizes.block_kv} keys; a row is a sequence of as many keys"
    title = tuple(Label(LEFT, 22 + LINE * number, text) for number, text in enumerate(lines))
    first, last = rows[0], rows[-1]
    bottom = frame.y + frame.height
    labels = (
        Label(frame.x, frame.y - 5, "kv 0"),
        Label(frame.x + frame.width - 40, frame.y - 5, str(sizes.kv_len - 1)),
        Label(8, frame.y + CELL, f"q {first.names['q']}"),
        Label(8, bottom, f"q {last.names['q']}"),
    )
    legend = tuple(
        Label(LEFT + 130 * place, bottom + 26, text) for place, text in enumerate(("visible", "full", "partial"))
    )
    width = max(frame.x + frame.width + RIGHT, LEFT + 420, LEFT + 7 * max(map(len, lines)))
    return Picture(width, bottom + 46, title, frame, seen, tuple(partial), tuple(full), labels, legend)


def _box(key: int, row: int, keys: int, rows: int, title: str = "") -> Box:
    return Box(LEFT + CELL * key, TOP + CELL * row, CELL * keys, CELL * rows, title)


def _list(values: Sequence[Number]) -> str:
    return str(values[0]) if len(values) == 1 else f"[{', '.join(map(str, values))}]"


def _usual(param: Param, sizes: Sizes) -> tuple[Number, ...]:
    """Values for a param of which the caller says nothing: three documents, a third of the keys, a half."""
    by_token = param.axes is not None and param.axes[-1] in ("q_token", "kv_token")
    if param.dtype == "bool":
        return (True, False, True) if by_token else (True,)
    if param.dtype in ("int32", "int64"):
        return (0, 1, 2) if by_token else (sizes.kv_len // 3,)
    return (0.5,)


class _Elements:
    """Params read at indices: values are spread in runs over the last axis."""

    def __init__(self, spec: Spec, params: Mapping[str, Sequence[Number]], sizes: Sizes) -> None:
        tokens = max(sizes.q_len, sizes.kv_len)
        known = {"head": spec.heads, "kv_head": spec.kv_heads, "seq": 1, "q_token": tokens, "kv_token": tokens}
        self.values = params
        self.extents = {
            param.name: [axis if isinstance(axis, int) else known[axis] for axis in param.axes]
            for param in spec.params
            if param.axes is not None
        }

    def __call__(self, name: str, indices: tuple[int, ...]) -> Number:
        extents = self.extents[name]
        if not all(0 <= index < extent for index, extent in zip(indices, extents, strict=True)):
            return 0
        values = self.values[name]
        return values[min(indices[-1] * len(values) // extents[-1], len(values) - 1)]


def _rows(spec: Spec, sizes: Sizes, params: Mapping[str, Sequence[Number]]) -> Iterator[_Row]:
    """The rows of one sequence; for a decode, sequences of every length."""
    numbers = {param.name: params[param.name][0] for param in spec.params if param.axes is None}
    common = {"h": 0, "kv_head": 0, "b": 0, "heads": spec.heads, "kv_start": 0, **numbers}
    if spec.query == "single":
        for kv_len in range(1, sizes.kv_len + 1):
            yield _Row({**common, "q": kv_len - 1, "q_token": 0, "q_len": 1, "kv_len": kv_len}, kv_len)
        return
    lengths = {"q_len": sizes.q_len, "kv_len": sizes.kv_len}
    for row in range(sizes.q_len):
        yield _Row({**common, **lengths, "q": sizes.kv_len - sizes.q_len + row, "q_token": row}, sizes.kv_len)


def _runs(spec: Spec, row: _Row, element: _Elements) -> list[tuple[int, int]]:
    """The visible keys of a row as (first, past the last)."""
    runs: list[tuple[int, int]] = []
    for key in range(row.kv_len):
        if visible(spec.mask, {**row.names, "kv": key, "kv_token": key}, element):
            if runs and runs[-1][1] == key:
                runs[-1] = (runs[-1][0], key + 1)
            else:
                runs.append((key, key + 1))
    return runs


def _visit(block: BlockPlan, rows: Sequence[_Row], sizes: Sizes, element: _Elements) -> Visit:
    def elements_of(test: ElementTest, tile: int) -> list[int]:
        first = tile * sizes.block_kv
        return [int(element(test.element.param, (token,))) for token in range(first, first + sizes.block_kv)]

    ranges = block.kernel.shaping.alternatives  # type: ignore[attr-defined]
    return visit(ranges, [row.names for row in rows], rows[0].kv_len, sizes.block_kv, element, elements_of)
