"""The syntax tree of a spec: what was written and where, with no opinion on what it means.

Nodes are frozen dataclasses; spans do not count for equality, so two texts that differ in spacing have equal trees.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dsl.diagnostics import Diagnostic
from dsl.source import Source, Span

_NOWHERE = Span(0, 0)


@dataclass(frozen=True, slots=True)
class Number:
    value: int | float
    span: Span = field(default=_NOWHERE, compare=False, repr=False)
    depth: int = field(default=1, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Name:
    text: str
    span: Span = field(default=_NOWHERE, compare=False, repr=False)
    depth: int = field(default=1, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Operator:
    text: str
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class List:
    """`[a, b, c]`"""

    items: tuple[Value, ...]
    span: Span = field(default=_NOWHERE, compare=False, repr=False)
    depth: int = field(default=1, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a call; `keyword` is the name before `=`, if there is one."""

    keyword: Name | None
    value: Value


@dataclass(frozen=True, slots=True)
class Call:
    """`function(a, b, name = c)`"""

    function: Name
    arguments: tuple[Argument, ...]
    span: Span = field(default=_NOWHERE, compare=False, repr=False)
    depth: int = field(default=1, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Index:
    """`name[a, b]`"""

    name: Name
    indices: List
    span: Span = field(default=_NOWHERE, compare=False, repr=False)
    depth: int = field(default=1, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Unary:
    operator: Operator
    operand: Value
    span: Span = field(default=_NOWHERE, compare=False, repr=False)
    depth: int = field(default=1, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Binary:
    operator: Operator
    left: Value
    right: Value
    span: Span = field(default=_NOWHERE, compare=False, repr=False)
    depth: int = field(default=1, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Chain:
    """`a < b <= c`: one operand more than operators."""

    operands: tuple[Value, ...]
    operators: tuple[Operator, ...]
    span: Span = field(default=_NOWHERE, compare=False, repr=False)
    depth: int = field(default=1, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Scaled:
    """`fp8_e4m3 per [kv_head]`"""

    dtype: Name
    axes: List
    span: Span = field(default=_NOWHERE, compare=False, repr=False)
    depth: int = field(default=1, compare=False, repr=False)


Value = Number | Name | List | Call | Index | Unary | Binary | Chain | Scaled


@dataclass(frozen=True, slots=True)
class Field:
    """`name = value`"""

    name: Name
    value: Value
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Param:
    """`param name[axes] : dtype`; `axes` is None for a number."""

    name: Name
    axes: List | None
    dtype: Name
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Attention:
    """`attention name from base { ... }`. `name` is None where the head failed to parse.

    `broken` holds every name in the block's items that failed to parse: nothing more is to be said about those.
    """

    name: Name | None
    base: Name | None
    fields: tuple[Field, ...]
    params: tuple[Param, ...]
    span: Span = field(default=_NOWHERE, compare=False, repr=False)
    broken: frozenset[str] = field(default=frozenset(), compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Workload:
    """`workload name { ... }`. `name` is None where the head failed to parse."""

    name: Name | None
    fields: tuple[Field, ...]
    span: Span = field(default=_NOWHERE, compare=False, repr=False)
    broken: frozenset[str] = field(default=frozenset(), compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """`dispatch name = [a, b]`"""

    name: Name
    blocks: List
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


Block = Attention | Workload | Dispatch


@dataclass(frozen=True, slots=True)
class File:
    """All blocks in the order of the text, and what the parser had to say about the rest.

    `broken` holds the names in the heads that failed to parse.
    """

    blocks: tuple[Block, ...]
    source: Source = field(compare=False, repr=False)
    diagnostics: tuple[Diagnostic, ...] = field(default=(), compare=False, repr=False)
    broken: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
