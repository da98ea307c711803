"""Axis lists to boxes: how TMA reads some tokens of a page, for any cache whose runs are long enough.

A box lies in shared memory as rows of at most 128 bytes. Every size in it is a power of two, so what a warp reads of it
is a matter of bits: each bit of a token's number and of a position along the head dimension has a place of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from dsl.layout import find, is_power_of_two, power_of_two_part
from dsl.plan.tiles import MINIMUM_DOT, next_power_of_two
from dsl.spec import Axis, Layout

ROW_ELEMENTS = 64
"""Elements of 2 bytes in a row of shared memory that a swizzle spreads over all banks."""
SHORTEST_RUN = 8
"""Elements of 2 bytes that TMA reads at least: 16 bytes."""
FEWEST_ROWS = 8
"""Rows of a box: the swizzle repeats after as many, and a box begins at a multiple of 128 bytes."""
MapAxis = int | tuple[int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """One axis of a box in shared memory: so many tokens, or so many positions along the dimension."""

    is_token: bool
    size: str
    extent: int = field(compare=False)


@dataclass(frozen=True, slots=True)
class PageBox:
    """How the tokens of one box are read from a cache.

    `axes` are those of the tensor map, slowest first: an axis of the tensor by its number, or (extent, stride) in
    elements. `dense` are the axes of the tensor whose stride the map takes for granted, and that stride. `coordinates`
    are printed, from `page`, `kv_head` and `slot`. `parts` are the axes of the box, slowest first.
    """

    name: str
    tensor: str
    coordinates: tuple[str, ...]
    parts: tuple[Part, ...]
    axes: tuple[MapAxis, ...] = field(compare=False)
    box: tuple[int, ...] = field(compare=False)
    dense: tuple[tuple[int, int], ...] = field(compare=False)
    row_elements: int = field(compare=False)

    @property
    def map(self) -> str:
        return f"{self.name}_map"

    @property
    def shape(self) -> str:
        """The printed shape of a tile, boxes first."""
        return f"BOXES, {', '.join(part.size for part in self.parts)}"

    @property
    def kinds(self) -> str:
        """The printed kinds of the axes of `shape`: tokens, or positions along the dimension."""
        return "t" + "".join("t" if part.is_token else "d" for part in self.parts)

    def order(self, tokens_first: bool) -> str:
        """The printed permutation of `shape` to tokens and dims."""
        tokens = [axis for axis, kind in enumerate(self.kinds) if kind == "t"]
        dims = [axis for axis, kind in enumerate(self.kinds) if kind == "d"]
        return ", ".join(map(str, tokens + dims if tokens_first else dims + tokens))

    @property
    def keys_order(self) -> str:
        return self.order(tokens_first=False)

    @property
    def values_order(self) -> str:
        return self.order(tokens_first=True)


def padded_dim(dim: int) -> int:
    """A head dimension as a product takes it: positions past the true one are zeros."""
    return max(MINIMUM_DOT, next_power_of_two(dim))


def box_slots(block: int, tile: int) -> int:
    """The tokens of one box: they lie in one page."""
    return min(tile, power_of_two_part(block))


def reason_against_boxes(tensor: str, layout: Layout, block: int, dim: int, tile: int) -> str | None:
    """Why TMA does not read a cache, None where it does."""
    last = layout[-1]
    if last.name not in ("dim", "slot"):
        return f"{tensor} is contiguous along {last}"
    split = next((axis for axis in layout if axis.part == "inner"), None)
    if split is not None and not is_power_of_two(split.factor):
        return f"{tensor} is cut into runs of {split.factor}, which is no power of two"
    if split is not None and split.name == "slot" and split.factor > box_slots(block, tile):
        return f"{tensor} has runs of {split.factor} slots, more than are read at once"
    if split is not None and split != last:
        return f"{tensor} is contiguous along {last}, but {split.name} is cut"
    box = _page_box("k", tensor, layout, block, dim, tile, "QK")
    if box.row_elements < SHORTEST_RUN:
        return f"{tensor} is contiguous in runs of less than 16 bytes"
    rows = prod(box.box) // box.row_elements
    if rows < FEWEST_ROWS:
        return f"{tensor} has {rows} rows of {2 * box.row_elements} bytes in a box, fewer than {FEWEST_ROWS}"
    return None


def page_box(name: str, tensor: str, layout: Layout, block: int, dim: int, tile: int) -> PageBox:
    """The box of a cache that `reason_against_boxes` has nothing against. `name` is `k` or `v`."""
    return _page_box(name, tensor, layout, block, dim, tile, {"k": "QK", "v": "V"}[name])


def _page_box(name: str, tensor: str, layout: Layout, block: int, dim: int, tile: int, prefix: str) -> PageBox:
    slots, last = box_slots(block, tile), layout[-1]
    padded = padded_dim(dim)
    slot_axes, dim_axes = find(layout, "slot"), find(layout, "dim")
    outer: list[MapAxis] = [layout.index(Axis("block"))]
    coordinates = ["page"]
    if Axis("kv_head") in layout:
        outer.append(layout.index(Axis("kv_head")))
        coordinates.append("kv_head")
    ones = (1,) * len(outer)
    place = {axis: layout.index(axis) for axis in layout}
    if last.part == "inner" and last.name == "dim" and block == slots and _are_last(layout, dim_axes[0], slot_axes[0]):
        # The whole page of a KV head makes up one run.
        run = last.factor
        row = min(ROW_ELEMENTS, slots * run)
        axes = ((dim * block // row, row), (row, 1))
        coordinates += ["0", "0"]
        box = (padded * block // row, row)
        dense = ((place[dim_axes[0]], block * run), (place[slot_axes[0]], run))
        parts = (
            Part(False, f"{prefix}_PADDED // {run}", padded // run),
            Part(True, "BOX", slots),
            Part(False, str(run), run),
        )
    elif last.part == "inner" and last.name == "dim":
        # Slots and the inner part of the dimension make up one run.
        run = last.factor
        row = min(ROW_ELEMENTS, slots * run)
        axes = (place[dim_axes[0]], (block * run // row, row), (row, 1))
        coordinates += ["0", f"slot // {row // run}" if row > run else f"slot * {run // row}", "0"]
        box = (padded // run, slots * run // row, row)
        dense = ((place[slot_axes[0]], run),)
        parts = (
            Part(False, f"{prefix}_PADDED // {run}", padded // run),
            Part(True, "BOX", slots),
            Part(False, str(run), run),
        )
    elif last.part == "inner":
        # The dimension and the inner part of the slots make up one run.
        run = last.factor
        row = min(ROW_ELEMENTS, power_of_two_part(dim * run))
        axes = (place[slot_axes[0]], (dim * run // row, row), (row, 1))
        coordinates += [f"slot // {run}", "0", "0"]
        box = (slots // run, padded * run // row, row)
        dense = ((place[dim_axes[0]], run),)
        parts = (
            Part(True, f"BOX // {run}", slots // run),
            Part(False, f"{prefix}_PADDED", padded),
            Part(True, str(run), run),
        )
    elif last.name == "dim":
        row = min(ROW_ELEMENTS, power_of_two_part(dim))
        axes = ((dim // row, row), place[slot_axes[0]], (row, 1))
        coordinates += ["0", "slot", "0"]
        box = (padded // row, slots, row)
        dense = ()
        parts = (
            Part(False, f"{prefix}_PADDED // {name.upper()}_ROW", padded // row),
            Part(True, "BOX", slots),
            Part(False, f"{name.upper()}_ROW", row),
        )
    elif block == slots and _are_last(layout, dim_axes[0]):
        # A page's dimension and slots make up one run.
        row = min(ROW_ELEMENTS, power_of_two_part(dim * block))
        axes = ((dim * block // row, row), (row, 1))
        coordinates += ["0", "0"]
        box = (padded * block // row, row)
        dense = ((place[dim_axes[0]], block),)
        parts = (Part(False, f"{prefix}_PADDED", padded), Part(True, "BOX", slots))
    else:
        row = slots
        axes = (place[dim_axes[0]], place[slot_axes[0]])
        coordinates += ["0", "slot"]
        box = (padded, slots)
        dense = ()
        parts = (Part(False, f"{prefix}_PADDED", padded), Part(True, "BOX", slots))
    return PageBox(name, tensor, tuple(coordinates), parts, (*outer, *axes), (*ones, *box), dense, row_elements=row)


def _are_last(layout: Layout, *axes: Axis) -> bool:
    """Whether axes stand, in this order, right before the last one."""
    return layout[-1 - len(axes) : -1] == axes
