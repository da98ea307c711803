"""The command group: commands are imported when they are called, and no error of a run shows a traceback."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping

import click

import dsl
from dsl.cli.console import note
from dsl.cli.exits import Exit
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


class Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def invoke(self, ctx: click.Context) -> object:
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except KeyboardInterrupt:
            note("interrupted")
            ctx.exit(Exit.INTERRUPTED)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(Exit.COULD_NOT_ASK)
        except Exception as error:
            if os.environ.get("ATTNSPEC_TRACEBACK"):
                raise
            note(f"error: {_describe(error)}")
            ctx.exit(Exit.COULD_NOT_ASK)


def _describe(error: Exception) -> str:
    if isinstance(error, OSError):
        return str(error)
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
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    group(prog_name="attnspec")
