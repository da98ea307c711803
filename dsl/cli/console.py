"""Results go to stdout, everything else to stderr; one JSON object where JSON was asked for."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, TextIO

import click

if TYPE_CHECKING:
    from rich.table import Table


def result(text: str) -> None:
    click.echo(text, nl=not text.endswith("\n"), color=True)


def note(text: str) -> None:
    click.echo(text, err=True, nl=not text.endswith("\n"), color=True)


def json_result(schema: str, version: int = 1, /, **fields: object) -> None:
    click.echo(json.dumps({"schema": f"attnspec.{schema}/{version}", **fields}, indent=2))


def wants_color(stream: TextIO | None) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def table(rows: Table, color: bool) -> str:
    """A table of rich as text, as wide as the terminal, or as it needs to be where there is none."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 160
    console = Console(width=width, force_terminal=color, no_color=not color, highlight=False)
    with console.capture() as capture:
        console.print(rows)
    return capture.get()


def colored_diff(diff: str) -> str:
    if not wants_color(sys.stdout):
        return diff
    return "".join(_colored_diff_line(line) for line in diff.splitlines(keepends=True))


def _colored_diff_line(line: str) -> str:
    if line.startswith(("---", "+++")):
        return click.style(line, bold=True)
    return click.style(line, fg={"@": "cyan", "+": "green", "-": "red"}.get(line[:1]))
