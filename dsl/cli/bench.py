"""`attnspec bench`: how fast the generated functions are on this machine's GPU, on the spec's workloads."""

from __future__ import annotations

import json
import sys

import click

from dsl.cli.console import json_result, note, result, table, wants_color
from dsl.cli.exits import Exit
from dsl.cli.outcome import attempt, gravest
from dsl.pipeline import module_name, read_source


def _checked(spec: str) -> None:
    from dsl.check import load_spec
    from dsl.plan import plan_module

    source = read_source(spec)
    module_name(source.name)
    plan_module(load_spec(source))


@click.command()
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
@click.option("--only", multiple=True, metavar="NAME", help="Time this block or dispatch only; may be repeated.")
@click.option("--tune", "file", metavar="FILE", help="Try other tiles; keep the fastest in FILE.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.pass_context
def bench(
    context: click.Context, specs: tuple[str, ...], only: tuple[str, ...], file: str | None, as_json: bool
) -> None:
    """Time functions on this GPU.

    Every block of every SPEC, on its workload; a block that computes the wrong thing is not timed.
    """
    outcomes = [attempt(spec, _checked) for spec in specs]
    if gravest(outcomes) != Exit.YES:
        if as_json:
            files = [{"spec": spec, **outcome.trouble_fields()} for spec, outcome in zip(specs, outcomes, strict=True)]
            json_result("bench", passed=False, rows=[], files=files)
        else:
            for outcome in outcomes:
                outcome.show_trouble()
        context.exit(gravest(outcomes))

    from dsl.bench.timing import NoGpu

    try:
        context.exit(_bench(specs, only, as_json) if file is None else _tune(specs, only, file, as_json))
    except NoGpu as error:
        note(f"error: {error}")
        context.exit(Exit.COULD_NOT_ASK)


def _bench(specs: tuple[str, ...], only: tuple[str, ...], as_json: bool) -> Exit:
    from dsl.bench import Row, bench_files

    def show(row: Row) -> None:
        time = "FAILED" if row.latency_us is None else f"{row.latency_us:.1f} us"
        note(f"{time:>12}  {row.block}, {row.case}")

    report = bench_files(specs, only=only or None, progress=show if sys.stderr.isatty() else None)
    if as_json:
        result(json.dumps(report.to_dict(), indent=2))
    else:
        result(table(report.table(), wants_color(sys.stdout)))
        for row in report.failures:
            note(f"FAILED {row.block}, {row.case}: {row.problem}")
        for line in report.not_timed:
            note(f"not timed: {line}")
    if not report.rows:
        note("error: nothing to time")
        return Exit.COULD_NOT_ASK
    return Exit.YES if report.passed else Exit.NO


def _tune(specs: tuple[str, ...], only: tuple[str, ...], file: str, as_json: bool) -> Exit:
    from dsl.bench import TuneError, tune_files
    from dsl.bench.tuning_file import TuningFileError

    try:
        tuning = tune_files(specs, file, only=only or None, progress=note)
    except TuneError as error:
        note(f"error: {error}")
        return Exit.NO
    except TuningFileError as error:
        note(f"error: {error}")
        return Exit.COULD_NOT_ASK
    result(json.dumps(tuning.to_dict(), indent=2) if as_json else table(tuning.table(), wants_color(sys.stdout)))
    for choice in tuning.choices:
        for reason in choice.skipped:
            note(f"skipped {', '.join(choice.blocks)}: {reason}")
    note(f"written {file}; the plan reads dsl/tuning/{tuning.machine.architecture}.json")
    return Exit.YES
