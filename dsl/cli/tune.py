"""`attnspec tune`: the tiles that are fastest on this machine's GPU, kept where the plan reads them."""

from __future__ import annotations

import json
import sys

import click

from dsl.cli.console import note, result, table, wants_color
from dsl.cli.exits import Exit
from dsl.cli.measuring import Answer, json_option, name_option, only_option, specs_argument
from dsl.source import Source


@click.command()
@specs_argument
@only_option("Tune")
@click.option("-o", "--output", metavar="FILE", help="Keep the tiles in FILE, not where the plan reads them.")
@name_option
@json_option
@click.pass_context
def tune(
    context: click.Context, specs: tuple[str, ...], only: tuple[str, ...], output: str | None, name: str, as_json: bool
) -> None:
    """Find the fastest tiles on this GPU.

    Tries candidate tiles on the workload of every block of every SPEC (`-` is stdin), and keeps the fastest in the file
    that the plan reads for this GPU, beside what it holds.
    """
    from dsl.bench.tuning import VERSION

    answer = Answer("tune", VERSION, {"choices": []}, as_json)
    context.exit(_tune(answer, answer.sources(context, specs, name), only, output))


def _tune(answer: Answer, sources: list[Source], only: tuple[str, ...], output: str | None) -> Exit:
    from dsl.bench import NoGpu, TuneError, tune_files
    from dsl.bench.tuning_file import TuningFileError

    try:
        tuning = tune_files(sources, output, only=only or None, progress=None if answer.as_json else note)
    except TuneError as error:
        return answer.refuse(error, Exit.NO)
    except (NoGpu, TuningFileError, OSError) as error:
        return answer.refuse(error)
    if answer.as_json:
        result(json.dumps(tuning.to_dict(), indent=2))
        return Exit.YES
    result(table(tuning.table(), wants_color(sys.stdout)))
    for choice in tuning.choices:
        for reason in choice.skipped:
            note(f"skipped {', '.join(choice.blocks)}: {reason}")
    note(f"written {tuning.file}" + ("; the next build reads it" if output is None else ""))
    return Exit.YES
