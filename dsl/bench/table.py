"""A report as a table for a terminal of 120 columns: ours, the peers beside it, and how much faster we are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dsl.bench.peers import KNOWN
from dsl.bench.report import Beside, Report, Row

if TYPE_CHECKING:
    from rich.table import Table

_MARKS = {"INCORRECT_NUMERICAL": "[bold red]wrong[/]", "RUNTIME_ERROR": "[red]failed[/]", "LEFT_OUT": "-"}


def table(report: Report) -> Table:
    """One line a row. Times are microseconds; the rate is the one that limits the row's family, with its percentage."""
    from rich import box
    from rich.table import Table

    result = Table(title=_title(report), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    peers = _peers(report)
    has_online = any(row.online for row in report.rows)
    for heading in ("block", "case"):
        result.add_column(heading, overflow="fold")
    online = ("online",) if has_online else ()
    units = {_rate(row)[1] for row in report.rows}
    unit = units.pop() if len(units) == 1 else None
    for heading in ("us", "eager", unit or "rate", "peak", *online, *peers, *(("ratio",) if peers else ())):
        result.add_column(heading, justify="right", no_wrap=True)
    previous = ""
    for row in report.rows:
        if previous and row.file != previous:
            result.add_section()
        previous = row.file
        result.add_row(*_cells(row, unit is None, has_online, peers))
    return result


def _peers(report: Report) -> tuple[str, ...]:
    """The peers that were asked about some row, in the order in which they are known."""
    asked = {name for row in report.rows for name in row.peers}
    return (*(name for name in KNOWN if name in asked), *sorted(asked - KNOWN.keys()))


def _rate(row: Row) -> tuple[float | None, str, float | None]:
    """What limits a row: its rate, the unit, and the percentage of the machine's."""
    if row.shape is not None and row.shape.family == "decode":
        return row.tb_per_s, "TB/s", row.copy_percent
    return row.tflop_per_s, "TFLOP/s", row.matmul_percent


def _cells(row: Row, has_units: bool, has_online: bool, peers: tuple[str, ...]) -> Iterator[str]:
    yield row.block
    yield row.case
    yield figure(row.latency_us) if row.passed else "[bold red]FAILED[/]"
    yield figure(row.eager_us)
    rate, unit, percent = _rate(row)
    yield "" if rate is None else f"{figure(rate)} {unit}" if has_units else figure(rate)
    yield "" if percent is None else f"{percent:.0f}%"
    if has_online:
        yield "" if row.online is None else _beside(row.online)
    for name in peers:
        yield _beside(row.peers[name]) if name in row.peers else ""
    if peers:
        yield "" if row.ratio is None else f"{row.ratio:.2f}"


def _beside(other: Beside) -> str:
    return figure(other.us) if other.status == "PASSED" else _MARKS[other.status]


def _title(report: Report) -> str:
    machine, ceilings = report.machine, report.ceilings
    matmuls = ", ".join(f"{dtype} {rate / 1e12:.0f}" for dtype, rate in ceilings.matmul.items())
    lines = [
        f"{machine.gpu} ({machine.architecture}), Triton {machine.triton}, torch {machine.torch}",
        f"copy {ceilings.copy / 1e12:.2f} TB/s, matmul {matmuls} TFLOP/s; times are us, peak is the share of these",
    ]
    if report.peers:
        origins = "; ".join(f"{name}: {origin}" for name, origin in report.peers.items())
        lines.append(f"{origins}; ratio is the best peer's time over ours")
    return "\n".join(lines)


def figure(value: float | None) -> str:
    """Three digits, and all before the point."""
    if value is None:
        return ""
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f}"
