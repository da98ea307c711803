"""`attnspec bench`: how fast the generated functions are on this machine's GPU, beside what one would run instead."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dsl.cli.console import error_line, note, result, table, wants_color
from dsl.cli.exits import Exit
from dsl.cli.measuring import Answer, json_option, name_option, only_option, specs_argument
from dsl.cli.outcome import in_words
from dsl.source import Source

if TYPE_CHECKING:
    from dsl.bench.report import Report, Row


@click.command()
@specs_argument
@only_option("Time")
@click.option(
    "--peers",
    "wanted",
    metavar="all|none|NAME,...",
    default="all",
    show_default=True,
    help="Compare with these; `all` is what is installed, without flex.",
)
@click.option(
    "--fa3", metavar="FILE", envvar="ATTNSPEC_FA3", help="Take FlashAttention-3 from vLLM's _vllm_fa3_C.abi3.so."
)
@click.option("--plot", metavar="FILE", help="Draw the rates into an SVG file.")
@name_option
@json_option
@click.pass_context
def bench(
    context: click.Context,
    specs: tuple[str, ...],
    only: tuple[str, ...],
    wanted: str,
    fa3: str | None,
    plot: str | None,
    name: str,
    as_json: bool,
) -> None:
    """Time functions on this GPU.

    Every block of every SPEC (`-` is stdin), on its workload, beside the peers that can take it. What computes the
    wrong thing, ours or a peer, is not timed.
    """
    from dsl.bench.report import VERSION

    answer = Answer("bench", VERSION, {"passed": False, "rows": []}, as_json)
    wish = _Wish(only, *_names(wanted), fa3, None if plot is None else Path(plot))
    context.exit(_bench(answer, answer.sources(context, specs, name), wish))


@dataclass(frozen=True, slots=True)
class _Wish:
    """What is to be timed and drawn; peers that are `required` were named, and must be there."""

    only: tuple[str, ...]
    names: list[str]
    required: list[str]
    fa3: str | None
    plot: Path | None


def _names(wanted: str) -> tuple[list[str], list[str]]:
    """The peers to look for, and those among them that were named. Raises UsageError."""
    from dsl.bench.peers import DEFAULT, KNOWN

    if wanted == "none":
        return [], []
    words = [word.strip() for word in wanted.split(",")]
    if unknown := [word for word in words if word not in KNOWN and word != "all"]:
        raise click.UsageError(f"unknown peer {', '.join(unknown)}; known are {', '.join(KNOWN)}, all and none")
    chosen = {*words, *(DEFAULT if "all" in words else ())}
    return [name for name in KNOWN if name in chosen], [word for word in words if word != "all"]


def _bench(answer: Answer, sources: list[Source], wish: _Wish) -> Exit:
    from dsl.bench import NoGpu
    from dsl.bench.peers import PeerError
    from dsl.emit import check_writable

    if wish.plot is not None and wish.plot.suffix != ".svg":
        return answer.refuse(f"{wish.plot}: --plot draws SVG, and writes files whose names end in .svg")
    try:
        if wish.plot is not None:
            check_writable(wish.plot)
        # A peer's library may log to stdout, where only the answer belongs.
        with contextlib.redirect_stdout(sys.stderr):
            report = _timed(sources, wish, watched=not answer.as_json and sys.stderr.isatty())
    except (NoGpu, PeerError, OSError) as error:
        return answer.refuse(error)
    if not report.rows:
        return answer.refuse("nothing to time")
    _print(report, answer.as_json)
    if wish.plot is not None and not _draws(report, wish.plot):
        return Exit.COULD_NOT_ASK
    return Exit.YES if report.passed else Exit.NO


def _timed(sources: list[Source], wish: _Wish, watched: bool) -> Report:
    """Raises NoGpu, and PeerError where a peer that was named is absent."""
    from dsl.bench import bench_files
    from dsl.bench.peers import find
    from dsl.bench.runner import gpu
    from dsl.check import load_spec

    clock = gpu()
    families = {spec.family for source in sources for spec in load_spec(source).attentions}
    peers = find(wish.names, families, fa3=wish.fa3, required=wish.required)
    return bench_files(sources, only=wish.only or None, progress=_show if watched else None, clock=clock, peers=peers)


def _draws(report: Report, path: Path) -> bool:
    """Draw the report, which is printed already: a disk that fills up costs the picture alone."""
    from dsl.bench.plot import plot_svg
    from dsl.emit import replace_file

    try:
        replace_file(path, plot_svg(report))
    except OSError as error:
        error_line(in_words(error, str(path)))
        return False
    return True


def _show(row: Row) -> None:
    time = "FAILED" if row.latency_us is None else f"{row.latency_us:.1f} us"
    note(f"{time:>12}  {row.block}, {row.case}")


def _print(report: Report, as_json: bool) -> None:
    if as_json:
        result(json.dumps(report.to_dict(), indent=2))
        return
    from dsl.bench.table import table as rows

    result(table(rows(report), wants_color(sys.stdout)))
    for row in report.failures:
        note(f"FAILED {row.block}, {row.case}: {row.problem}")
    for line in report.remarks:
        note(line)
    for line in report.not_timed:
        note(f"not timed: {line}")
