"""Results go to stdout, everything else to stderr; one JSON object where JSON was asked for."""

from __future__ import annotations

import json
import os
import sys
from typing import TextIO

import click


def result(text: str) -> None:
    click.echo(text, nl=not text.endswith("\n"), color=True)


def note(text: str) -> None:
    click.echo(text, err=True, nl=not text.endswith("\n"), color=True)


def json_result(schema: str, **fields: object) -> None:
    click.echo(json.dumps({"schema": f"attnspec.{schema}/1", **fields}, indent=2))


def wants_color(stream: TextIO | None) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def colored_diff(diff: str) -> str:
    if not wants_color(sys.stdout):
        return diff
    return "".join(_colored_diff_line(line) for line in diff.splitlines(keepends=True))


def _colored_diff_line(line: str) -> str:
    for prefix, style in (("---", {"bold": True}), ("+++", {"bold": True}), ("@@", {"fg": "cyan"})):
        if line.startswith(prefix):
            return click.style(line, **style)
    return click.style(line, fg={"+": "green", "-": "red"}.get(line[:1]))
