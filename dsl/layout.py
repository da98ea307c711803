"""Axis lists to addresses: the only place that knows how a tile of a cache is read for a given layout.

A tile of a paged cache is addressed as `rows + dims`: `rows` are pointers to tokens of one KV head, or chunks of slots
(head, page and slot); `dims` are offsets per element of the head dimension. Two shapes of tile cover every layout:

* *token rows*, where the contiguous axis belongs to `dim`: `[TILE, dim]`, or `[TILE, dim/N, N]` where the dimension is
  split, so that neighbouring lanes take neighbouring tokens and each reads one contiguous run;
* *slot chunks*, where the contiguous axis belongs to `slot`: `[dim, TILE / CHUNK, CHUNK]`. A chunk is a run of slots
  that are contiguous in memory and lie in one page, so one test a chunk keeps the loads wide.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dsl.spec import Axis, Layout


@dataclass(frozen=True, slots=True)
class DimPiece:
    """A power-of-two piece of a head dimension: 72 is 64 at 0 and 16 at 64, of which 8 are live.

    `size` and `start` are printed names or numbers; `live` is the name of the true dimension where the piece overhangs
    it, else None.
    """

    suffix: str
    size: str
    start: str
    extent: int = field(compare=False)
    offset: int = field(compare=False)
    live: str | None

    @property
    def indices(self) -> str:
        """The printed positions along the dimension, `[size]`."""
        arange = f"tl.arange(0, {self.size})"
        return arange if self.start == "0" else f"{self.start} + {arange}"

    def mask(self, rows: str, dims: str) -> str:
        """The printed test for a tile of rows, all live where `rows` are, and of these positions, printed as `dims`."""
        return f"{rows}[:, None] & ({dims}[None, :] < {self.live})" if self.live else f"{rows}[:, None]"


@dataclass(frozen=True, slots=True)
class Tile:
    """How one piece of one cache is loaded: printed expressions, ready for the template.

    `hoisted` are (name, expression, shape) that do not change over the loop. `keys` is the loaded tile as
    `[dim, TILE]`, `values` as `[TILE, dim]` (None: it is that already) with zeros in dead slots, which may hold
    anything: 0 * NaN is NaN.
    """

    name: str
    suffix: str
    size: str
    hoisted: tuple[tuple[str, str, str], ...]
    address: str
    mask: str | None
    shape: str
    keys: str
    values: str | None

    @property
    def value_name(self) -> str:
        return f"v{self.suffix}" if self.values else self.name


@dataclass(frozen=True, slots=True)
class CacheAccess:
    """One paged cache: its stride arguments, the pointers to its rows, and a `Tile` for each piece of the dimension."""

    tensor: str
    letter: str
    chunked: bool
    strides: tuple[tuple[str, int], ...]
    head: str
    rows: str
    alignment: str | None
    tiles: tuple[Tile, ...]

    @property
    def page_strides(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.strides if name.startswith(_page_strides(self.letter)))

    @property
    def hoisted(self) -> tuple[tuple[str, str, str], ...]:
        return tuple(line for tile in self.tiles for line in tile.hoisted)


_TOKEN_AXES = (("block", "page"), ("slot", "slot"))


def find(layout: Layout, name: str) -> tuple[Axis, ...]:
    """The one or two axes of a layout that make up `name`, outer part first."""
    axes = [axis for axis in layout if axis.name == name]
    return tuple(sorted(axes, key=lambda axis: axis.part == "inner"))


def power_of_two_part(number: int) -> int:
    """The largest power of two that divides `number`."""
    return number & -number


def is_power_of_two(number: int) -> bool:
    return number == power_of_two_part(number)


def contiguous_slots(layout: Layout, block: int) -> int:
    """How many neighbouring slots are contiguous and aligned to a power of two; 1 where the dimension is contiguous."""
    last = layout[-1]
    if last.name != "slot":
        return 1
    return power_of_two_part(block if last.part == "whole" else last.factor)


def stride_name(letter: str, axis: Axis) -> str:
    word = {"kv_head": "head", "q_token": "token", "kv_token": "token"}.get(axis.name, axis.name)
    suffix = {"whole": "", "outer": "_outer", "inner": "_inner"}[axis.part]
    return f"stride_{letter}_{word}{suffix}"


def _page_strides(letter: str) -> tuple[str, ...]:
    """How the names of strides within a page begin."""
    return stride_name(letter, Axis("slot")), stride_name(letter, Axis("dim"))


def stride_arguments(letter: str, layout: Layout) -> tuple[tuple[str, int], ...]:
    """(argument, position in the tensor's shape) of every axis but the last, whose stride is 1."""
    return tuple((stride_name(letter, axis), position) for position, axis in enumerate(layout[:-1]))


def offset(letter: str, layout: Layout, name: str, index: str) -> str:
    """Printed offset of `index` along the axis `name`, whole or split."""
    terms = []
    last = layout[-1]
    for axis in find(layout, name):
        part = {"whole": index, "outer": f"{index} // {axis.factor}", "inner": f"{index} % {axis.factor}"}[axis.part]
        if axis == last:
            terms.append(part)
        elif axis.part == "whole":
            terms.append(f"{part} * {stride_name(letter, axis)}")
        else:
            terms.append(f"({part}) * {stride_name(letter, axis)}")
    return " + ".join(terms)


def paged_cache(
    tensor: str, letter: str, layout: Layout, pieces: tuple[DimPiece, ...], live: str | None = "token_live"
) -> CacheAccess:
    """Plan the addresses of a paged cache.

    The kernel has in scope: `<letter>_head` (pointer), `token_page`/`token_slot` `[TILE]` or `chunk_page`/`chunk_slot`
    `[TILE // CHUNK]`, `live` `[TILE]` and `chunk_live` `[TILE // CHUNK]`, `in_chunk` `[CHUNK]`. `live` names the tokens
    that are read, None where all of a tile are.
    """
    chunked = layout[-1].name == "slot"
    index = "chunk" if chunked else "token"
    # Within a chunk the slot offset is the chunk's own arange, so the contiguous part contributes its first element.
    place = " + ".join(offset(letter, layout, name, f"{index}_{word}") for name, word in _TOKEN_AXES)
    has_heads = bool(find(layout, "kv_head"))
    alignment = {"dim": "ALIGNED_BYTES", "slot": "CHUNK_BYTES"}.get(layout[-1].name)
    make = _chunk_tile if chunked else _row_tile
    return CacheAccess(
        tensor=tensor,
        letter=letter,
        chunked=chunked,
        strides=stride_arguments(letter, layout),
        head=f"{tensor} + {offset(letter, layout, 'kv_head', 'kv_head.to(tl.int64)')}" if has_heads else tensor,
        rows=f"{letter}_head + {place}",
        alignment=alignment,
        tiles=tuple(make(letter, layout, piece, live) for piece in pieces),
    )


def _as_index(expression: str) -> str:
    return f"{expression}.to(INDEX)" if " + " not in expression else f"({expression}).to(INDEX)"


def _mask(*tests: str | None) -> str | None:
    """The printed test of a load, None where it needs none."""
    return " & ".join(test for test in tests if test) or None


def _row_tile(letter: str, layout: Layout, piece: DimPiece, token_live: str | None) -> Tile:
    last = layout[-1]
    name, dims = f"{letter}_tile{piece.suffix}", f"{letter}_dims{piece.suffix}"
    if last.part == "inner" and is_power_of_two(last.factor) and last.factor <= piece.extent:
        width = last.factor
        (outer,) = (axis for axis in find(layout, "dim") if axis.part == "outer")
        group = f"{letter}_dim_group{piece.suffix}"
        groups = f"{piece.size} // {width}"
        start = "" if piece.start == "0" else f"({piece.start}) // {width} + "
        hoisted = [
            (group, _as_index(f"{start}tl.arange(0, {groups})"), f"[{groups}]"),
            (
                dims,
                f"({group} * {stride_name(letter, outer)})[:, None] + tl.arange(0, {width})[None, :]",
                f"[{groups}, {width}]",
            ),
        ]
        if piece.live:
            hoisted.append((f"{dims}_live", f"{group} < {piece.live} // {width}", f"[{groups}]"))
        return Tile(
            name=name,
            suffix=piece.suffix,
            size=piece.size,
            hoisted=tuple(hoisted),
            address=f"{letter}_rows[:, None, None] + {dims}[None, :, :]",
            mask=_mask(token_live and f"{token_live}[:, None, None]", piece.live and f"{dims}_live[None, :, None]"),
            shape=f"[TILE, {groups}, {width}]",
            keys=f"tl.trans(tl.reshape({name}, [TILE, {piece.size}]))",
            values=f"tl.reshape({name}, [TILE, {piece.size}])",
        )
    hoisted, live = _flat_dims(letter, layout, piece)
    return Tile(
        name=name,
        suffix=piece.suffix,
        size=piece.size,
        hoisted=hoisted,
        address=f"{letter}_rows[:, None] + {dims}[None, :]",
        mask=_mask(token_live and f"{token_live}[:, None]", live and f"{live}[None, :]"),
        shape=f"[TILE, {piece.size}]",
        keys=f"tl.trans({name})",
        values=None,
    )


def _chunk_tile(letter: str, layout: Layout, piece: DimPiece, token_live: str | None) -> Tile:
    name, dims = f"{letter}_tile{piece.suffix}", f"{letter}_dims{piece.suffix}"
    hoisted, live = _flat_dims(letter, layout, piece)
    flat = f"tl.reshape({name}, [{piece.size}, TILE])"
    return Tile(
        name=name,
        suffix=piece.suffix,
        size=piece.size,
        hoisted=hoisted,
        address=f"{letter}_rows[None, :, None] + {dims}[:, None, None] + in_chunk[None, None, :]",
        mask=_mask(token_live and "chunk_live[None, :, None]", live and f"{live}[:, None, None]"),
        shape=f"[{piece.size}, TILE // CHUNK, CHUNK]",
        keys=flat,
        values=f"tl.trans(tl.where({token_live}[None, :], {flat}, 0.0))" if token_live else f"tl.trans({flat})",
    )


def _flat_dims(letter: str, layout: Layout, piece: DimPiece) -> tuple[tuple[tuple[str, str, str], ...], str | None]:
    """Offsets of one piece as a flat vector, and the name of its liveness test where it overhangs."""
    dim, dims = f"{letter}_dim{piece.suffix}", f"{letter}_dims{piece.suffix}"
    place = offset(letter, layout, "dim", dim)
    hoisted = [(dim, _as_index(piece.indices), f"[{piece.size}]")]
    if place == dim:
        hoisted = [(dims, hoisted[0][1], hoisted[0][2])]
        dim = dims
    else:
        hoisted.append((dims, place, f"[{piece.size}]"))
    if piece.live is None:
        return tuple(hoisted), None
    return (*hoisted, (f"{dims}_live", f"{dim} < {piece.live}", f"[{piece.size}]")), f"{dims}_live"
