"""The command group: commands are imported when they are called, and no error of a run shows a traceback."""

from __future__ import annotations

import importlib
import os
import sys

import click

import dsl
from dsl.cli.console import note
from dsl.cli.exits import Exit

COMMANDS = ("build", "check", "fmt", "verify", "explain", "bench", "doctor")


class Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return getattr(importlib.import_module(f"dsl.cli.{cmd_name}"), cmd_name)

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
        except OSError as error:
            note(f"error: {error}")
            ctx.exit(Exit.COULD_NOT_ASK)
        except Exception as error:
            if os.environ.get("ATTNSPEC_TRACEBACK"):
                raise
            note(f"error: {type(error).__name__}: {error}")
            note("this is a fault of attnspec, not of its input; with ATTNSPEC_TRACEBACK=1 it shows where")
            ctx.exit(Exit.COULD_NOT_ASK)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 yes, 1 the answer is no, 2 the question could not be asked.",
)
@click.version_option(dsl.__version__, prog_name="attnspec")
def group() -> None:
    """Compile `.attn` specs of attention to readable Triton modules."""


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    group(prog_name="attnspec")
