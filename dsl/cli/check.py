"""`attnspec check`: every finding about the specs, in the form that the reader wants."""

from __future__ import annotations

import sys

import click

from dsl.cli.console import error_line, json_result, note, result, wants_color
from dsl.cli.exits import Exit
from dsl.cli.outcome import attempt, read_spec, refuse_stdin_twice, rendered
from dsl.diagnostics import Form


def _planned(spec: str) -> object:
    from dsl.check import load_spec
    from dsl.plan import plan_module

    return plan_module(load_spec(read_spec(spec)))


@click.command()
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
@click.option(
    "--format",
    "form",
    type=click.Choice(["human", "short", "json", "github"]),
    default="human",
    show_default=True,
    help="How findings are printed.",
)
@click.option("--json", "form", flag_value="json", help="The same as --format json.")
@click.pass_context
def check(context: click.Context, specs: tuple[str, ...], form: Form) -> None:
    """Report what is wrong with every SPEC.

    What no plan target could compute is reported too. `-` reads stdin.
    """
    refuse_stdin_twice(specs)
    worst = Exit.YES
    records: list[dict[str, object]] = []
    for spec in specs:
        outcome = attempt(spec, _planned)
        worst = max(worst, outcome.exit)
        if form == "json":
            records.append({"spec": spec, "ok": outcome.exit == Exit.YES, **outcome.trouble_fields()})
            continue
        if outcome.refusal is not None:
            result(rendered(outcome.refusal, form, wants_color(sys.stdout)))
        if outcome.error is not None:
            error_line(outcome.error)
    if form == "json":
        json_result("check", files=records)
    elif form == "human" and worst == Exit.YES:
        note(f"{len(specs)} {'spec' if len(specs) == 1 else 'specs'} without a finding")
    context.exit(worst)
