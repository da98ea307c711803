"""A report as a picture: one panel a block, rates over the size of the batch, ours and the peers as lines.

Everything is placed here; the template `plot.svg.jinja` prints it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dsl.bench.axes import Scale, linear_ticks, log_ticks, pixels, short
from dsl.bench.peers import KNOWN
from dsl.bench.report import Report, Row
from dsl.render import environment

PANEL_WIDTH, PANEL_HEIGHT = 520, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 18, 40, 52
_MARGIN, _LINE, _LEGEND_LINE = 16, 20, 24
_CHARACTER, _BOLD_CHARACTER = 7.2, 8.2
_COLUMNS = 2

OURS, ONLINE = "ours", "ours, softmax = online"
_STYLES = {
    OURS: ("#0b5cad", 2.6, "M-4.5 0A4.5 4.5 0 1 1 4.5 0A4.5 4.5 0 1 1 -4.5 0Z"),
    ONLINE: ("#5aa9e6", 1.8, "M-3.5 0A3.5 3.5 0 1 1 3.5 0A3.5 3.5 0 1 1 -3.5 0Z"),
    "cudnn": ("#5c8a00", 1.8, "M-4 -4H4V4H-4Z"),
    "fa2": ("#b8860b", 1.8, "M0 -5L5 4H-5Z"),
    "fa3": ("#c8401a", 1.8, "M0 -5.5L5.5 0L0 5.5L-5.5 0Z"),
    "fa4": ("#8e44ad", 1.8, "M0 5L5 -4H-5Z"),
    "flashinfer": ("#00857a", 1.8, "M-4 -4L4 4M-4 4L4 -4"),
    "vllm": ("#a03060", 1.8, "M-5 0H5M0 -5V5"),
    "flex": ("#555555", 1.8, "M-4.5 -2.5H4.5V2.5H-4.5Z"),
}
_UNKNOWN = ("#222222", 1.8, "M-2.5 -4.5H2.5V4.5H-2.5Z")


@dataclass(frozen=True, slots=True)
class Style:
    color: str
    width: float
    marker: str


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text at its place in pixels."""

    x: str
    y: str
    text: str


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of the legend: a sample of the line, and its name."""

    style: Style
    start: str
    middle: str
    end: str
    y: str
    label: Text


@dataclass(frozen=True, slots=True)
class Tick:
    """A line of the grid from one point to another, and its label."""

    x1: str
    y1: str
    x2: str
    y2: str
    label: Text


@dataclass(frozen=True, slots=True)
class Point:
    """A marker, and what is said when the pointer rests on it."""

    x: str
    y: str
    title: str


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    style: Style
    line: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One block: a frame, its ticks, the roof that this machine's copy or matmul makes, and the lines."""

    left: str
    top: str
    width: str
    height: str
    title: Text
    x_label: Text
    y_label: Text
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    roof: Tick
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class Plot:
    width: int
    height: int
    title: tuple[Text, ...]
    keys: tuple[Key, ...]
    panels: tuple[Panel, ...]


def plot_svg(report: Report) -> str:
    """The picture as the text of an SVG file; a block none of whose rows passed has no panel."""
    return environment().get_template("plot.svg.jinja").render(plot=plot(report))


def plot(report: Report) -> Plot:
    """Place everything: a title, a legend, and panels in rows of two."""
    blocks: dict[tuple[str, str], list[Row]] = {}
    for row in report.rows:
        if row.passed and row.shape is not None:
            blocks.setdefault((row.file, row.block), []).append(row)
    columns = max(1, min(_COLUMNS, len(blocks)))
    width = columns * PANEL_WIDTH + 2 * _MARGIN
    title = _title(report, width)
    top = 2 * _MARGIN + _LINE * len(title)
    names = _names(row for rows in blocks.values() for row in rows)
    keys = _legend(names, top, width)
    top += _LEGEND_LINE * len({key.y for key in keys})
    panels = []
    for number, rows in enumerate(blocks.values()):
        line, column = divmod(number, columns)
        panels.append(_panel(report, rows, names, _MARGIN + column * PANEL_WIDTH, top + line * PANEL_HEIGHT))
    lines = -(-len(panels) // columns)
    return Plot(width, top + lines * PANEL_HEIGHT + _MARGIN, title, keys, tuple(panels))


def _title(report: Report, width: int) -> tuple[Text, ...]:
    machine = report.machine
    described = "; ".join(f"{name}: {origin}" for name, origin in report.peers.items())
    versions = f"torch {machine.torch}, Triton {machine.triton}" + (f"; {described}" if described else "")
    lines = [
        f"{machine.gpu} ({machine.architecture})",
        *textwrap.wrap(versions, int((width - 2 * _MARGIN) / _CHARACTER)),
    ]
    return tuple(
        Text(pixels(_MARGIN), pixels(_MARGIN + _LINE * (place + 0.7)), line) for place, line in enumerate(lines)
    )


def _names(rows: Iterable[Row]) -> tuple[str, ...]:
    """The series that some row has a point of: ours first."""
    found = {name for row in rows for name in _rates(row)}
    order = (OURS, ONLINE, *KNOWN)
    return (*(name for name in order if name in found), *sorted(found - set(order)))


def _legend(names: Sequence[str], top: float, width: int) -> tuple[Key, ...]:
    """Entries from left to right, in as many lines as they need."""
    keys, x, y = [], float(_MARGIN), top
    for name in names:
        needed = 42 + _CHARACTER * len(name) + 18
        if x + needed > width and x > _MARGIN:
            x, y = float(_MARGIN), y + _LEGEND_LINE
        label = Text(pixels(x + 40), pixels(y + 4.5), name)
        keys.append(Key(_style(name), pixels(x), pixels(x + 16), pixels(x + 32), pixels(y), label))
        x += needed
    return tuple(keys)


def _style(name: str) -> Style:
    return Style(*_STYLES.get(name, _UNKNOWN))


def _rates(row: Row) -> dict[str, float]:
    """A row's points by series: TB/s of a decode, TFLOP/s of the others."""
    others = {OURS: row, **({ONLINE: row.online} if row.online else {}), **row.peers}
    rates = {name: other.tb_per_s if _is_decode(row) else other.tflop_per_s for name, other in others.items()}
    return {name: rate for name, rate in rates.items() if rate is not None}


def _is_decode(row: Row) -> bool:
    return row.shape is not None and row.shape.family == "decode"


def _size(row: Row) -> int:
    """What a row stands over: keys of a decode, query tokens of the others; a batch of none counts as one."""
    assert row.shape is not None
    return max(1, row.shape.kv_tokens if _is_decode(row) else row.shape.q_tokens)


def _panel(report: Report, rows: Sequence[Row], names: Sequence[str], left: float, top: float) -> Panel:
    decode = _is_decode(rows[0])
    shape = rows[0].shape
    assert shape is not None
    roof = (report.ceilings.copy if decode else report.ceilings.matmul[shape.dtype]) / 1e12
    sizes = [_size(row) for row in rows]
    highest = 1.12 * max(roof, *(rate for row in rows for rate in _rates(row).values()))
    scale = Scale(
        left=left + _LEFT,
        bottom=top + PANEL_HEIGHT - _BOTTOM,
        width=PANEL_WIDTH - _LEFT - _RIGHT,
        height=PANEL_HEIGHT - _TOP - _BOTTOM,
        least=min(sizes) / 1.5,
        most=max(sizes) * 1.5,
        highest=highest,
    )
    unit = "TB/s" if decode else "TFLOP/s"
    dims = (
        str(shape.head_dim_qk) if shape.head_dim_qk == shape.head_dim_v else f"{shape.head_dim_qk}/{shape.head_dim_v}"
    )
    title = _shortened(rows[0].block, f": {shape.heads}/{shape.kv_heads} heads x {dims}, {shape.dtype}", scale.width)
    middle = scale.bottom - scale.height / 2
    return Panel(
        left=pixels(scale.left),
        top=pixels(scale.bottom - scale.height),
        width=pixels(scale.width),
        height=pixels(scale.height),
        title=Text(pixels(scale.left), pixels(top + _TOP - 12), title),
        x_label=Text(
            pixels(scale.left + scale.width / 2),
            pixels(scale.bottom + 40),
            "keys of all sequences" if decode else "query tokens of all sequences",
        ),
        y_label=Text(pixels(left + 14), pixels(middle), unit),
        x_ticks=tuple(_x_tick(scale, size) for size in log_ticks(scale.least, scale.most)),
        y_ticks=tuple(_y_tick(scale, rate) for rate in linear_ticks(highest)),
        roof=_roof(scale, roof, f"{'copy' if decode else 'matmul'} {roof:.3g} {unit}"),
        series=tuple(_series(scale, rows, name, unit) for name in names if any(name in _rates(row) for row in rows)),
    )


def _shortened(name: str, rest: str, width: float) -> str:
    """Name and rest in one bold line of that many pixels."""
    room = max(1, int(width / _BOLD_CHARACTER) - len(rest))
    return (name if len(name) <= room else f"{name[: room - 1]}\N{HORIZONTAL ELLIPSIS}") + rest


def _series(scale: Scale, rows: Sequence[Row], name: str, unit: str) -> Series:
    found = sorted((_size(row), _rates(row)[name], row.case) for row in rows if name in _rates(row))
    points = tuple(
        Point(pixels(scale.x(size)), pixels(scale.y(rate)), f"{name}: {rate:.3g} {unit}, {case}")
        for size, rate, case in found
    )
    return Series(name, _style(name), " ".join(f"{point.x},{point.y}" for point in points), points)


def _x_tick(scale: Scale, size: int) -> Tick:
    x = pixels(scale.x(size))
    label = Text(x, pixels(scale.bottom + 18), short(size))
    return Tick(x, pixels(scale.bottom - scale.height), x, pixels(scale.bottom), label)


def _y_tick(scale: Scale, rate: float) -> Tick:
    y = scale.y(rate)
    label = Text(pixels(scale.left - 8), pixels(y + 4), f"{rate:g}")
    return Tick(pixels(scale.left), pixels(y), pixels(scale.left + scale.width), pixels(y), label)


def _roof(scale: Scale, rate: float, text: str) -> Tick:
    """The roof's label stands above the line, at its right end."""
    y = scale.y(rate)
    label = Text(pixels(scale.left + scale.width - 6), pixels(y - 5), text)
    return Tick(pixels(scale.left), pixels(y), pixels(scale.left + scale.width), pixels(y), label)
