"""The command group: commands are imported when they are called, and no error of a run shows a traceback."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import NoReturn

import click

import dsl
from dsl.cli.console import complain
from dsl.cli.exits import Exit
from dsl.cli.outcome import in_words
from dsl.cli.streams import prepare
from dsl.header import CODEGEN

COMMANDS = ("build", "check", "fmt", "verify", "explain", "bench", "tune", "doctor")


class LazyCommands(Mapping[str, click.Command]):
    """Each command from the file of its name, imported at the first look."""

    def __getitem__(self, name: str) -> click.Command:
        if name not in COMMANDS:
            raise KeyError(name)
        return getattr(importlib.import_module(f"dsl.cli.{name}"), name)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _NobodyReads(Exception):
    """Whoever asked has closed the pipe."""


class Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def main(self, args: Sequence[str] | None = None, *rest: object, **options: object) -> NoReturn:
        words = sys.argv[1:] if args is None else list(args)
        sys.exit(self._status(words, *rest, **options))

    def _status(self, words: list[str], *rest: object, **options: object) -> int:
        """Run a command. Whatever keeps it from an answer is said on stderr, or as JSON where JSON was asked for."""
        as_json = asks_for_json(words)
        try:
            status = super().main(words, *rest, **{**options, "standalone_mode": False})  # type: ignore[arg-type]
            sys.stdout.flush()
            return status or Exit.YES
        except click.ClickException as error:
            if as_json:
                complain(error.format_message(), as_json)
            else:
                error.show()
            return Exit.COULD_NOT_ASK
        except (click.Abort, KeyboardInterrupt):
            complain("interrupted", as_json)
            return Exit.INTERRUPTED
        except (BrokenPipeError, _NobodyReads):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return Exit.COULD_NOT_ASK
        except Exception as error:
            if os.environ.get("ATTNSPEC_TRACEBACK"):
                raise
            complain(_describe(error), as_json)
            return Exit.COULD_NOT_ASK

    def invoke(self, ctx: click.Context) -> object:
        """As it is, but click would have words and exit codes of its own for an interrupt and for a closed pipe."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise click.Abort from interrupt
        except BrokenPipeError as error:
            raise _NobodyReads from error


def asks_for_json(words: Sequence[str]) -> bool:
    """Whether a command line wants JSON, even one that cannot be parsed."""
    options = list(takewhile(lambda word: word != "--", words))
    return not {"--json", "--format=json"}.isdisjoint(options) or ("--format", "json") in pairwise(options)


def _describe(error: Exception) -> str:
    if isinstance(error, OSError):
        return in_words(error, "stdout")
    if isinstance(error, ModuleNotFoundError) and error.name in ("numpy", "torch", "triton"):
        return f"this needs {error.name}: pip install 'attnspec[torch,triton]'"
    return (
        f"{type(error).__name__}: {error}\n"
        "this is a fault of attnspec, not of its input; ATTNSPEC_TRACEBACK=1 shows where it lies"
    )


@click.group(
    cls=Group,
    commands=LazyCommands(),
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 yes, 1 the answer is no, 2 the question could not be asked.",
)
@click.version_option(dsl.__version__, prog_name="attnspec", message=f"%(prog)s %(version)s, codegen {CODEGEN}")
def group() -> None:
    """Compile `.attn` specs of attention to readable Triton modules."""


def main() -> None:
    prepare()
    group(prog_name="attnspec")
