"""`attnspec build`: specs become modules, or under `--check` the answer whether they already are."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import click

from dsl.cli.console import colored_diff, json_result, on_terminal, result
from dsl.cli.exits import Exit
from dsl.cli.outcome import attempt, read_spec, refuse_stdin_twice
from dsl.emit import compare, emit
from dsl.pipeline import NameRefused, generate, module_name


@dataclass(frozen=True, slots=True)
class Built:
    path: Path
    status: Literal["written", "unchanged", "differs"]
    diff: str | None = None


@dataclass(slots=True)
class Builder:
    """The options of one run, and which spec has taken which module name."""

    output: Path
    targets: tuple[str, ...] | None
    dry: bool
    force: bool
    stdin_name: str
    owners: dict[str, str] = field(default_factory=dict)

    def build(self, spec: str) -> Built:
        source = read_spec(spec, self.stdin_name)
        stem = module_name(source.name)
        owner = self.owners.setdefault(stem, spec)
        if owner != spec:
            raise NameRefused(f"{spec}: would overwrite the module of {owner}; rename one of the two")
        path = self.output / f"{stem}.py"
        text = generate(source, self.targets)
        if self.dry:
            diff = compare(text, path)
            return Built(path, "unchanged" if diff is None else "differs", diff)
        self.output.mkdir(parents=True, exist_ok=True)
        return Built(path, emit(text, path, force=self.force))


@click.command()
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
@click.option("-o", "--output", default="generated", show_default=True, metavar="DIR", help="Folder of the modules.")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if a module differs from its spec.")
@click.option("--diff", "show_diff", is_flag=True, help="As --check, and print what would change.")
@click.option("--target", "targets", multiple=True, metavar="TARGET", help="Plan for TARGET only; may be repeated.")
@click.option("--force", is_flag=True, help="Overwrite files that are foreign or were edited.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--name", metavar="NAME", help="Name of the spec that is read from stdin.")
@click.pass_context
def build(
    context: click.Context,
    specs: tuple[str, ...],
    output: str,
    check: bool,
    show_diff: bool,
    targets: tuple[str, ...],
    force: bool,
    as_json: bool,
    name: str | None,
) -> None:
    """Write the module of every SPEC.

    SPEC is a file, or `-` for stdin, which needs --name; its module is DIR/<stem>.py.
    """
    if ("-" in specs) != (name is not None):
        raise click.UsageError("a spec on stdin (`-`) and --name go together")
    refuse_stdin_twice(specs)
    _known(targets)
    builder = Builder(
        Path(output), targets or None, check or show_diff, force, f"{(name or '').removesuffix('.attn')}.attn"
    )
    worst = Exit.YES
    records: list[dict[str, object]] = []
    for spec in specs:
        outcome = attempt(spec, builder.build)
        worst = max(worst, outcome.exit)
        record: dict[str, object] = {"spec": spec, **outcome.trouble_fields()}
        if built := outcome.value:
            if built.status == "differs":
                worst = max(worst, Exit.NO)
            record.update(path=str(built.path), status=built.status, diff=built.diff)
        records.append(record)
        if as_json:
            continue
        outcome.show_trouble()
        if built:
            result(on_terminal(f"{built.status} {built.path}"))
            if show_diff and built.diff:
                result(colored_diff(built.diff))
    if as_json:
        json_result("build", files=records)
    context.exit(worst)


def _known(targets: tuple[str, ...]) -> None:
    if not targets:
        return
    from dsl.plan.refuse import TARGETS

    if unknown := [target for target in targets if target not in TARGETS]:
        raise click.UsageError(f"unknown target {', '.join(unknown)}; known are {', '.join(TARGETS)}")
