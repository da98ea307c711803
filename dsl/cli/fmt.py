"""`attnspec fmt`: specs in their one form."""

from __future__ import annotations

import difflib
from pathlib import Path

import click

from dsl.cli.console import colored_diff, on_terminal, result
from dsl.cli.exits import Exit
from dsl.cli.outcome import attempt, read_spec
from dsl.emit import replace_file
from dsl.source import Source


def _format(spec: str) -> tuple[Source, str]:
    from dsl.fmt import format_source

    source = read_spec(spec)
    return source, format_source(source)


@click.command()
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if a spec would change.")
@click.option("--diff", "show_diff", is_flag=True, help="As --check, and print what would change.")
@click.pass_context
def fmt(context: click.Context, specs: tuple[str, ...], check: bool, show_diff: bool) -> None:
    """Rewrite every SPEC in its one form.

    `-` formats stdin to stdout.
    """
    worst = Exit.YES
    for spec in specs:
        outcome = attempt(spec, _format)
        worst = max(worst, outcome.exit)
        outcome.show_trouble()
        if outcome.value is None:
            continue
        source, text = outcome.value
        changed = text.encode() != source.data
        if check or show_diff:
            if changed:
                worst = max(worst, Exit.NO)
                result(on_terminal(f"differs {spec}"))
            if show_diff:
                result(colored_diff(_diff(source, text)))
        elif spec == "-":
            result(text)
        elif changed:
            written = attempt(spec, lambda path, text=text: replace_file(Path(path), text))
            worst = max(worst, written.exit)
            written.show_trouble()
            if written.exit == Exit.YES:
                result(on_terminal(f"written {spec}"))
        else:
            result(on_terminal(f"unchanged {spec}"))
    context.exit(worst)


def _diff(source: Source, text: str) -> str:
    before, after = source.text.splitlines(keepends=True), text.splitlines(keepends=True)
    lines = difflib.unified_diff(before, after, source.name, f"{source.name} (formatted)")
    return "".join(lines)
