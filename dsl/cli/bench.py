"""`attnspec bench`: how fast the generated functions are on this machine's GPU, on the spec's workloads."""

from __future__ import annotations

import json
import sys

import click

from dsl.cli.console import result, table, wants_color
from dsl.cli.exits import Exit


@click.command()
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.pass_context
def bench(context: click.Context, specs: tuple[str, ...], as_json: bool) -> None:
    """Time functions on this GPU.

    Every function of every SPEC, on its workloads; a function that computes the wrong thing is not timed.
    """
    from dsl.bench import bench_files

    report = bench_files(specs)
    result(json.dumps(report.to_dict(), indent=2) if as_json else table(report.table(), wants_color(sys.stdout)))
    context.exit(Exit.YES if report.passed else Exit.NO)
