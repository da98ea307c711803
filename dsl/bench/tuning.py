"""What tuning chose: tiles for each key, a table of them, and the same as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsl.bench.measure import Machine
from dsl.bench.tuning_file import Key

if TYPE_CHECKING:
    from rich.table import Table

VERSION = 2
SCHEMA = f"attnspec.tune/{VERSION}"

Tiles = tuple[tuple[str, int], ...]
"""A candidate by its numbers, as a tuning file keeps them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The tiles that were chosen for a key, and how much faster they are than the plan's were; None if those fail."""

    key: Key
    blocks: tuple[str, ...]
    config: Mapping[str, int]
    gain: float | None
    tried: int
    skipped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tuning:
    """What one run of tuning chose, and the file that keeps it."""

    machine: Machine
    choices: tuple[Choice, ...]
    file: Path

    def to_dict(self) -> dict[str, Any]:
        choices = [{**dataclasses.asdict(choice), "key": choice.key._asdict()} for choice in self.choices]
        machine = dataclasses.asdict(self.machine)
        return {"schema": SCHEMA, "machine": machine, "file": str(self.file), "choices": choices}

    def table(self) -> Table:
        from rich.table import Table

        table = Table(title=f"tuned on {self.machine.gpu} ({self.machine.architecture})", title_justify="left")
        for heading in ("blocks", "tiles", "against the plan's", "tried", "skipped"):
            table.add_column(heading, overflow="fold")
        for choice in self.choices:
            gain = "" if choice.gain is None else f"{choice.gain:.2f} x as fast"
            tiles, counts = shown(tuple(choice.config.items())), (str(choice.tried), str(len(choice.skipped)))
            table.add_row(", ".join(choice.blocks), tiles, gain, *counts)
        return table


def shown(tiles: Tiles) -> str:
    return " ".join(f"{name} {size}" for name, size in tiles)
