"""`attnspec explain`: a code of the catalogue, or what the plan makes of a spec and why."""

from __future__ import annotations

import re
from pathlib import Path

import click

from dsl.cli.console import error_line, result
from dsl.cli.exits import Exit
from dsl.cli.outcome import attempt, in_words, read_spec


class _Numbers(click.ParamType):
    """Two positive whole numbers, as `128,64`."""

    name = "N,N"

    def convert(self, value, param, ctx) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"([1-9]\d{0,5}),([1-9]\d{0,5})", value)
        if found is None:
            self.fail(f"{value!r} is not two whole numbers from 1, such as 64,64", param, ctx)
        return int(found[1]), int(found[2])


class _Values(click.ParamType):
    """A param's values, as `window=9` or `document=0,1,2`."""

    name = "NAME=VALUE,..."

    def convert(self, value, param, ctx) -> tuple[str, tuple[int | float, ...]]:
        if isinstance(value, tuple):
            return value
        name, _, written = value.partition("=")
        try:
            numbers = tuple(float(each) if re.search(r"[.e]", each) else int(each) for each in written.split(","))
        except ValueError:
            self.fail(f"{value!r} is no param and its values, such as window=9 or document=0,1,2", param, ctx)
        return name, numbers


def _explained(spec: str, name: str) -> str:
    from dsl.check import load_spec

    spec_file = load_spec(read_spec(spec, name))
    from dsl.explain import explain as explain_spec

    return explain_spec(spec_file)


def _drawn(spec: str, name: str, only: str | None, lengths: tuple[int, int], tiles: tuple[int, int], values) -> str:
    from dsl.check import load_spec
    from dsl.picture import PictureError, Sizes, mask_svg
    from dsl.plan import plan_module

    plan = plan_module(load_spec(read_spec(spec, name)))
    blocks = {block.spec.name: block for block in plan.blocks}
    if only is not None and only not in blocks:
        raise click.UsageError(f"there is no block {only}; the blocks are {', '.join(blocks)}")
    masked = [block for block in plan.blocks if block.spec.has_mask]
    block = blocks[only] if only is not None else (masked or list(plan.blocks))[0]
    try:
        return mask_svg(block, Sizes(*lengths, *tiles), dict(values))
    except PictureError as error:
        raise click.UsageError(str(error)) from error


@click.command()
@click.argument("subject", metavar="SPEC|CODE")
@click.option("--name", metavar="NAME", default="spec.attn", help="Name of the spec that is read from stdin.")
@click.option("--mask", metavar="SVG", type=click.Path(dir_okay=False, path_type=Path), help="Draw a block's mask.")
@click.option("--block", metavar="NAME", help="The block to draw; the first with a mask is usual.")
@click.option("--lengths", type=_Numbers(), default="64,64", show_default=True, help="Queries and keys to draw.")
@click.option("--tiles", type=_Numbers(), default="8,8", show_default=True, help="Rows and keys of a drawn tile.")
@click.option("--param", "values", type=_Values(), multiple=True, help="Values of a param, spread over it in runs.")
@click.pass_context
def explain(context: click.Context, subject: str, name: str, mask: Path | None, block, lengths, tiles, values) -> None:
    """Explain a spec's plan, or a code.

    SPEC is a file, or `-` for stdin. CODE is that of a finding, such as ATTN101. With --mask, what is written is a
    picture: which pairs of a query and a key are visible, and which tiles are visited, with the mask's test or without.
    """
    if re.fullmatch(r"attn\d+", subject, re.IGNORECASE):
        context.exit(_explain_code(subject.upper()))
    if mask is not None:
        outcome = attempt(subject, lambda spec: _drawn(spec, name, block, lengths, tiles, values))
    else:
        outcome = attempt(subject, lambda spec: _explained(spec, name))
    outcome.show_trouble()
    if outcome.value is not None and mask is not None:
        context.exit(_write(mask, outcome.value))
    if outcome.value is not None:
        result(outcome.value)
    context.exit(outcome.exit)


def _write(path: Path, text: str) -> Exit:
    from dsl.emit import EmitError, replace_file

    try:
        replace_file(path, text)
    except OSError as error:
        error_line(in_words(error, str(path)))
        return Exit.COULD_NOT_ASK
    except EmitError as error:
        error_line(str(error))
        return Exit.COULD_NOT_ASK
    result(f"written {path}")
    return Exit.YES


def _explain_code(code: str) -> Exit:
    from dsl.catalogue import CATALOGUE

    if code not in CATALOGUE:
        error_line(f"{code}: no such code; they go from {min(CATALOGUE)} to {max(CATALOGUE)}")
        return Exit.COULD_NOT_ASK
    entry = CATALOGUE[code]
    result(f"{code}: {entry.title}\n\n{entry.explanation}")
    return Exit.YES
