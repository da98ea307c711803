"""What `bench` and `tune` share: specs that must all be sound before a GPU is asked, and answers that can be JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import click

from dsl.cli.console import error_line, json_result
from dsl.cli.exits import Exit
from dsl.cli.outcome import attempt, checked_spec, gravest, in_words, refuse_stdin_twice
from dsl.source import Source

specs_argument = click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
name_option = click.option(
    "--name", metavar="NAME", default="spec.attn", help="Name of the spec that is read from stdin (`-`)."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")


def only_option(verb: str) -> Callable[[Callable], Callable]:
    return click.option(
        "--only", multiple=True, metavar="NAME", help=f"{verb} this block or dispatch only; may be repeated."
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command says that it has none: on stderr, or as the JSON object of its schema."""

    schema: str
    version: int
    empty: dict[str, object]
    as_json: bool

    def refuse(self, error: Exception | str, exit: Exit = Exit.COULD_NOT_ASK) -> Exit:
        said = in_words(error, self.schema) if isinstance(error, OSError) else str(error)
        if self.as_json:
            json_result(self.schema, self.version, **self.empty, error=said)
        else:
            error_line(said)
        return exit

    def sources(self, context: click.Context, specs: tuple[str, ...], name: str) -> list[Source]:
        """The specs, or the end of the command where one of them cannot be planned."""
        refuse_stdin_twice(specs)
        outcomes = [attempt(spec, lambda path: checked_spec(path, name)) for spec in specs]
        if (worst := gravest(outcomes)) != Exit.YES:
            if self.as_json:
                files = [
                    {"spec": spec, **outcome.trouble_fields()} for spec, outcome in zip(specs, outcomes, strict=True)
                ]
                json_result(self.schema, self.version, **self.empty, files=files)
            else:
                for outcome in outcomes:
                    outcome.show_trouble()
            context.exit(worst)
        return [outcome.value for outcome in outcomes if outcome.value is not None]
