"""What a verification found: one row for each function and batch, a table of them, and the same as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = "attnspec.verify/1"


@dataclass(frozen=True, slots=True)
class Row:
    """One function on one batch. Errors are None where there was no result; `problem` says why a row failed."""

    file: str
    function: str
    block: str
    case: str
    adversity: str
    passed: bool
    seconds: float
    error: float | None = None
    bar: float | None = None
    row_error: float | None = None
    row_bar: float | None = None
    lse_error: float | None = None
    lse_bar: float | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """All rows of a run. `device` says what ran the kernels; `not_run` what this run does not show."""

    device: str
    rows: tuple[Row, ...]
    not_run: tuple[str, ...] = ()

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
            "device": self.device,
            "passed": self.passed,
            "not_run": list(self.not_run),
            "rows": [{name: _plain(value) for name, value in dataclasses.asdict(row).items()} for row in self.rows],
        }

    def table(self) -> Table:
        from rich.table import Table

        has_lse = any(row.lse_error is not None for row in self.rows)
        table = Table(title=f"verified on {self.device}", title_justify="left")
        for heading in ("function", "case", "adversity"):
            table.add_column(heading, overflow="fold")
        for heading in ("error", "bar", "worst row", *["lse"] * has_lse, "seconds"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("")
        previous = ""
        for row in self.rows:
            if previous and row.file != previous:
                table.add_section()
            previous = row.file
            table.add_row(
                row.function,
                row.case,
                row.adversity,
                *(_figure(value) for value in (row.error, row.bar, row.row_error, *[row.lse_error] * has_lse)),
                f"{row.seconds:.1f}",
                "[green]ok[/]" if row.passed else "[bold red]FAILED[/]",
            )
        return table


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and value == float("inf") else value
