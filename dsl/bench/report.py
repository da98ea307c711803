"""What a benchmark found: one row for each block and workload case, a table of them, and the same as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dsl.bench.measure import Ceilings, Machine, Mode

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = "attnspec.bench/1"
Status = Literal["PASSED", "INCORRECT_NUMERICAL", "RUNTIME_ERROR"]


@dataclass(frozen=True, slots=True)
class Row:
    """One block on one case. Where `status` is not PASSED there are no times, and `problem` says why.

    `bytes` and `flops` are what the case needs at least; percentages are of this machine's own copy and matmul.
    `eager_us` is one call as Python sees it, its launch included.
    """

    file: str
    block: str
    case: str
    status: Status
    bytes: int = 0
    flops: int = 0
    mode: Mode | None = None
    latency_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    eager_us: float | None = None
    tb_per_s: float | None = None
    tflop_per_s: float | None = None
    copy_percent: float | None = None
    matmul_percent: float | None = None
    error: float | None = None
    bar: float | None = None
    problem: str | None = None

    @property
    def passed(self) -> bool:
        return self.status == "PASSED"


@dataclass(frozen=True, slots=True)
class Report:
    """All rows of a run. `not_timed` says which of the blocks that were asked for have no row, and why."""

    machine: Machine
    ceilings: Ceilings
    rows: tuple[Row, ...]
    not_timed: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.passed for row in self.rows)

    @property
    def failures(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.passed)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: an error that is infinite becomes the text `inf`."""
        return {
            "schema": SCHEMA,
            "passed": self.passed,
            "machine": dataclasses.asdict(self.machine),
            "copy_tb_per_s": self.ceilings.copy / 1e12,
            "matmul_tflop_per_s": {dtype: rate / 1e12 for dtype, rate in self.ceilings.matmul.items()},
            "not_timed": list(self.not_timed),
            "rows": [_plain(dataclasses.asdict(row)) for row in self.rows],
        }

    def table(self) -> Table:
        from rich.table import Table

        table = Table(title=self._title(), title_justify="left")
        for heading in ("block", "case"):
            table.add_column(heading, overflow="fold")
        for heading in ("us", "p20", "p80", "eager us", "mode", "TB/s", "% copy", "TFLOP/s", "% matmul", "error"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("")
        previous = ""
        for row in self.rows:
            if previous and row.file != previous:
                table.add_section()
            previous = row.file
            times = (row.latency_us, row.p20_us, row.p80_us, row.eager_us)
            rates = (row.tb_per_s, row.copy_percent, row.tflop_per_s, row.matmul_percent)
            table.add_row(
                row.block,
                row.case,
                *map(_figure, times),
                row.mode or "",
                *map(_figure, rates),
                "" if row.error is None else f"{row.error:.1e}",
                "[green]ok[/]" if row.passed else "[bold red]FAILED[/]",
            )
        return table

    def _title(self) -> str:
        matmuls = ", ".join(f"{dtype} {rate / 1e12:.0f}" for dtype, rate in self.ceilings.matmul.items())
        return (
            f"{self.machine.gpu} ({self.machine.architecture}), Triton {self.machine.triton}, "
            f"torch {self.machine.torch}; copy {self.ceilings.copy / 1e12:.2f} TB/s, matmul {matmuls} TFLOP/s"
        )


def _figure(value: float | None) -> str:
    """Three digits, and all before the point."""
    if value is None:
        return ""
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f}"


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: str(value) if value == math.inf else value for name, value in fields.items()}
