"""Results go to stdout, everything else to stderr; one JSON object where JSON was asked for."""

from __future__ import annotations

import contextlib
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
    """A line on stderr, lost where stderr takes none."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True, nl=not text.endswith("\n"), color=True)


def error_line(text: str) -> None:
    """The line that says why there is no answer. The names of files in it may hold anything."""
    note(f"error: {on_terminal(text)}")


def complain(text: str, as_json: bool) -> None:
    """Say why there is no answer, on stderr, or as the one JSON object where JSON was asked for and can be written."""
    if as_json:
        with contextlib.suppress(OSError):
            json_result("error", error=text)
            sys.stdout.flush()
            return
    error_line(text)


def on_terminal(text: str) -> str:
    """The text without anything that could move a terminal's cursor."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)


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
    diff = on_terminal(diff)
    if not wants_color(sys.stdout):
        return diff
    return "".join(_colored_diff_line(line) for line in diff.splitlines(keepends=True))


def _colored_diff_line(line: str) -> str:
    if line.startswith(("---", "+++")):
        return click.style(line, bold=True)
    return click.style(line, fg={"@": "cyan", "+": "green", "-": "red"}.get(line[:1]))
