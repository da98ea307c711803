"""One file's share of a run: a value, the findings about its spec, or the one line that says why there is neither."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from dsl.cli.console import note, wants_color
from dsl.cli.exits import Exit
from dsl.diagnostics import Diagnostic, SpecError
from dsl.emit import EmitError
from dsl.load import LoadError
from dsl.pipeline import NameRefused
from dsl.source import Source

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Value]):
    exit: Exit
    value: Value | None = None
    error: str | None = None
    refusal: SpecError | None = None

    def show_trouble(self) -> None:
        """Print what went wrong, if anything did, to stderr."""
        if self.refusal is not None:
            note(rendered(self.refusal, "human", wants_color(sys.stderr)))
        if self.error is not None:
            note(f"error: {self.error}")

    def trouble_fields(self) -> dict[str, object]:
        """The same for a JSON object; empty where nothing went wrong."""
        fields: dict[str, object] = {}
        if self.refusal is not None:
            source = self.refusal.source
            fields["diagnostics"] = [diagnostic_fields(source, finding) for finding in self.refusal.diagnostics]
        if self.error is not None:
            fields["error"] = self.error
        return fields


def attempt(path: str, work: Callable[[str], Value]) -> Outcome[Value]:
    """Do one file's work. What a user can cause becomes an outcome; a bug stays an exception."""
    try:
        return Outcome(Exit.YES, work(path))
    except SpecError as refusal:
        return Outcome(Exit.NO, refusal=refusal)
    except UnicodeDecodeError as error:
        return Outcome(Exit.COULD_NOT_ASK, error=f"{path}: not UTF-8: byte {error.start} cannot be decoded")
    except OSError as error:
        place = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else path
        return Outcome(Exit.COULD_NOT_ASK, error=f"{place}: {(error.strerror or str(error)).lower()}")
    except (NameRefused, EmitError, LoadError) as error:
        return Outcome(Exit.COULD_NOT_ASK, error=str(error))


def read_spec(path: str, stdin_name: str | None = None) -> Source:
    """Read a spec file, or stdin for `-`. Raises OSError or UnicodeDecodeError."""
    if path != "-":
        return Source.read(path)
    return Source.from_bytes(stdin_name or "<stdin>", sys.stdin.buffer.read())


def rendered(refusal: SpecError, form: str, color: bool) -> str:
    from dsl.diagnostics import render

    return render(refusal.source, refusal.diagnostics, form, color)


def diagnostic_fields(source: Source, finding: Diagnostic) -> dict[str, object]:
    line, column = source.position(finding.span.start)
    end_line, end_column = source.position(finding.span.end)
    return {
        "code": finding.code,
        "message": finding.message,
        "help": finding.help,
        "line": line,
        "column": column,
        "end_line": end_line,
        "end_column": end_column,
    }
