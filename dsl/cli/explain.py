"""`attnspec explain`: a code of the catalogue, or what the plan makes of a spec and why."""

from __future__ import annotations

import re

import click

from dsl.cli.console import error_line, result
from dsl.cli.exits import Exit
from dsl.cli.outcome import attempt, read_spec


def _explained(spec: str, name: str) -> str:
    from dsl.check import load_spec

    spec_file = load_spec(read_spec(spec, name))
    from dsl.explain import explain as explain_spec

    return explain_spec(spec_file)


@click.command()
@click.argument("subject", metavar="SPEC|CODE")
@click.option("--name", metavar="NAME", default="spec.attn", help="Name of the spec that is read from stdin.")
@click.pass_context
def explain(context: click.Context, subject: str, name: str) -> None:
    """Explain a spec's plan, or a code.

    SPEC is a file, or `-` for stdin. CODE is that of a finding, such as ATTN101.
    """
    if re.fullmatch(r"attn\d+", subject, re.IGNORECASE):
        context.exit(_explain_code(subject.upper()))
    outcome = attempt(subject, lambda spec: _explained(spec, name))
    outcome.show_trouble()
    if outcome.value is not None:
        result(outcome.value)
    context.exit(outcome.exit)


def _explain_code(code: str) -> Exit:
    from dsl.catalogue import CATALOGUE

    if code not in CATALOGUE:
        error_line(f"{code}: no such code; they go from {min(CATALOGUE)} to {max(CATALOGUE)}")
        return Exit.COULD_NOT_ASK
    entry = CATALOGUE[code]
    result(f"{code}: {entry.title}\n\n{entry.explanation}")
    return Exit.YES
