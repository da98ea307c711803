"""`attnspec verify`: the generated functions beside a dense float64 reference."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

import click

from dsl.cli.console import error_line, json_result, note, result, table, wants_color
from dsl.cli.exits import Exit
from dsl.cli.outcome import attempt, checked_spec, gravest, refuse_stdin_twice
from dsl.pipeline import module_name
from dsl.source import Source

_NO_GPU = "no GPU; --device cpu runs the kernels in Triton's interpreter"


@click.command()
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("-o", "--output", metavar="DIR", help="Verify the modules in DIR as they stand, not freshly built ones.")
@click.option("--only", multiple=True, metavar="NAME", help="Verify this block or dispatch only; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--name", metavar="NAME", default="spec.attn", help="Name of the spec that is read from stdin.")
@click.pass_context
def verify(
    context: click.Context,
    specs: tuple[str, ...],
    device: Literal["auto", "cpu", "cuda"],
    output: str | None,
    only: tuple[str, ...],
    as_json: bool,
    name: str,
) -> None:
    """Compare functions with a reference.

    Builds every SPEC, a file or `-` for stdin, and runs each of its functions beside a dense reference in float64;
    without a GPU, in Triton's interpreter.
    """
    refuse_stdin_twice(specs)
    outcomes = [attempt(spec, lambda spec: checked_spec(spec, name)) for spec in specs]
    if gravest(outcomes) != Exit.YES:
        if as_json:
            files = [{"spec": spec, **outcome.trouble_fields()} for spec, outcome in zip(specs, outcomes, strict=True)]
            json_result("verify", passed=False, rows=[], files=files)
        else:
            for outcome in outcomes:
                outcome.show_trouble()
        context.exit(gravest(outcomes))
    sources = [outcome.value for outcome in outcomes if outcome.value is not None]
    obstacle = _NO_GPU if device == "cuda" and not _has_gpu() else _obstacle(sources, output, only)
    if obstacle is not None:
        if as_json:
            json_result("verify", passed=False, rows=[], error=obstacle)
        else:
            error_line(obstacle)
        context.exit(Exit.COULD_NOT_ASK)

    from dsl.verify.report import Row
    from dsl.verify.runner import verify_files

    def show(row: Row) -> None:
        note(f"{'ok' if row.passed else 'FAILED':6} {row.function}, {row.case} ({row.seconds:.1f} s)")

    watched = not as_json and sys.stderr.isatty()
    report = verify_files(
        sources, device=device, output_dir=output, progress=show if watched else None, only=only or None
    )
    if as_json:
        result(json.dumps(report.to_dict(), indent=2))
    else:
        result(table(report.table(), wants_color(sys.stdout)))
        for row in report.failures:
            note(f"FAILED {row.function}, {row.case}: {row.problem or 'the error is above the bar'}")
        for line in report.not_run:
            note(f"not run: {line}")
        note(f"{len(report.rows) - len(report.failures)} of {len(report.rows)} passed")
    if not report.rows:
        if not as_json:
            error_line("nothing to verify under that name")
        context.exit(Exit.COULD_NOT_ASK)
    context.exit(Exit.YES if report.passed else Exit.NO)


def _obstacle(sources: list[Source], output: str | None, only: tuple[str, ...]) -> str | None:
    """What of the question does not exist: a name, or a module."""
    from dsl.verify.runner import unknown_names

    if unknown := unknown_names(sources, only):
        return f"no block or dispatch has the name {' or '.join(unknown)}"
    modules = [] if output is None else [Path(output) / f"{module_name(source.name)}.py" for source in sources]
    missing = next((module for module in modules if not module.is_file()), None)
    return None if missing is None else f"{missing}: no such module"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
