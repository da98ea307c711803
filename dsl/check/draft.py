"""One attention block on its way from syntax to a Spec: what the rules read, write and report to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dsl import nodes
from dsl.diagnostics import MOST_FINDINGS, Diagnostic
from dsl.expr.tree import Expression
from dsl.source import Span


class TooManyFindings(Exception):
    """Enough is wrong: whatever comes next would not be reported."""


Related = tuple[tuple[Span, str], ...]


@dataclass
class Report:
    """Where rules put what they find."""

    diagnostics: list[Diagnostic] = field(default_factory=list)

    def error(
        self, code: str, place: Span, message: str, advice: str | None = None, related: Related | list = ()
    ) -> None:
        if len(self.diagnostics) > MOST_FINDINGS:
            raise TooManyFindings
        self.diagnostics.append(Diagnostic(code, place, message, advice, tuple(related)))


@dataclass
class Draft(Report):
    """A block with its inherited fields and params.

    `values` are the Spec's fields as far as the rules have come: a rule that finds an error leaves its value out, and
    one that needs a value that is not there stays silent. `unknown` are names that failed to parse, `typed` the
    expressions of fields (None for what does not type), which a block made from this one need not type again.
    """

    block: nodes.Attention = field(kw_only=True)
    fields: dict[str, nodes.Field] = field(default_factory=dict, kw_only=True)
    params: dict[str, nodes.Param] = field(default_factory=dict, kw_only=True)
    inherited: set[str] = field(default_factory=set, kw_only=True)
    unknown: frozenset[str] = field(default_factory=frozenset, kw_only=True)
    unknown_base: bool = field(default=False, kw_only=True)
    values: dict[str, Any] = field(default_factory=dict, kw_only=True)
    base: Draft | None = field(default=None, kw_only=True)
    typed: dict[str, Expression | None] = field(default_factory=dict, kw_only=True)

    @property
    def name(self) -> str:
        """The block's name; empty where it failed to parse."""
        return self.block.name.text if self.block.name else ""

    @property
    def place(self) -> Span:
        """Where to point when the block as a whole is meant."""
        return self.block.name.span if self.block.name else self.block.span

    def value(self, name: str) -> nodes.Value | None:
        """What a field was set to, if it was."""
        return self.fields[name].value if name in self.fields else None

    def is_missing(self, name: str) -> bool:
        """Whether the field was not written: nowhere, not even in an item that failed to parse."""
        return name not in self.fields and name not in self.unknown and not self.unknown_base

    def get(self, *names: str) -> list[Any] | None:
        """The values of these Spec fields, or None where one of them is not known."""
        if all(name in self.values for name in names):
            return [self.values[name] for name in names]
        return None
