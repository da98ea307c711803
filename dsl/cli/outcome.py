"""One file's share of a run: a value, the findings about its spec, or the one line that says why there is neither."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import click

from dsl.cli.console import error_line, note, wants_color
from dsl.cli.exits import Exit
from dsl.diagnostics import Form, SpecError, record, render
from dsl.emit import EmitError
from dsl.load import LoadError
from dsl.pipeline import NameRefused, decode_source, module_name, read_source
from dsl.source import Source, read_at_most

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
            error_line(self.error)

    def trouble_fields(self) -> dict[str, object]:
        """The same for a JSON object; empty where nothing went wrong."""
        fields: dict[str, object] = {}
        if self.refusal is not None:
            source = self.refusal.source
            fields["diagnostics"] = [record(source, finding) for finding in self.refusal.diagnostics]
        if self.error is not None:
            fields["error"] = self.error
        return fields


def attempt(path: str, work: Callable[[str], Value]) -> Outcome[Value]:
    """Do one file's work. What a user can cause becomes an outcome; a bug stays an exception."""
    try:
        return Outcome(Exit.YES, work(path))
    except SpecError as refusal:
        return Outcome(Exit.NO, refusal=refusal)
    except OSError as error:
        return Outcome(Exit.COULD_NOT_ASK, error=in_words(error, path))
    except (NameRefused, EmitError, LoadError) as error:
        return Outcome(Exit.COULD_NOT_ASK, error=str(error))


def in_words(error: OSError, path: str) -> str:
    """The file, or `path` where the error names none, and what is wrong with it."""
    place = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else path
    return f"{place}: {(error.strerror or str(error)).lower()}"


def gravest(outcomes: Iterable[Outcome[Value]]) -> Exit:
    return max((outcome.exit for outcome in outcomes), default=Exit.YES)


def read_spec(path: str, stdin_name: str = "<stdin>") -> Source:
    """Read a spec file, or stdin for `-`. Raises OSError or SpecError."""
    if path == "-" and sys.stdin is None:
        raise OSError(errno.EBADF, "is closed", "stdin")
    return decode_source(stdin_name, read_at_most(sys.stdin.buffer)) if path == "-" else read_source(path)


def refuse_stdin_twice(specs: Iterable[str]) -> None:
    """Raises UsageError where more than one spec is `-`."""
    if sum(spec == "-" for spec in specs) > 1:
        raise click.UsageError("stdin (`-`) can be read once")


def checked_spec(path: str, stdin_name: str) -> Source:
    """Read a spec, or stdin for `-`, that can be planned under its name. Raises OSError, SpecError or NameRefused."""
    from dsl.check import load_spec
    from dsl.plan import plan_module

    source = read_spec(path, stdin_name)
    module_name(source.name)
    plan_module(load_spec(source))
    return source


def rendered(refusal: SpecError, form: Form, color: bool) -> str:
    return render(refusal.source, refusal.diagnostics, form, color)
