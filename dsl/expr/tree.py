"""The typed expression tree that `check` builds and every consumer walks.

`type` is one of `int32`, `int64`, `float`, `bool`. A comparison chain is a conjunction of comparisons, `causal` is
`kv <= q`, and every constant subtree has been folded. Spans do not count for equality.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dsl.source import Span

Type = Literal["int32", "int64", "float", "bool"]
_NOWHERE = Span(0, 0)


@dataclass(frozen=True, slots=True)
class Constant:
    value: int | float | bool
    type: Type
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Name:
    """A scalar param or a built-in.

    The built-ins are `q`, `kv`, `h`, `kv_head`, `b`, `q_token`, `kv_token`, `q_len`, `kv_len` and `score`.
    """

    name: str
    type: Type
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Index:
    """An element of a tensor param: one int expression an axis."""

    param: str
    indices: tuple[Expression, ...]
    type: Type
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Unary:
    operator: Literal["-", "not"]
    operand: Expression
    type: Type
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Binary:
    """Arithmetic, comparison or boolean operator; operands may differ in type and are promoted as the language says."""

    operator: Literal["+", "-", "*", "/", "//", "%", "==", "!=", "<", "<=", ">", ">=", "and", "or"]
    left: Expression
    right: Expression
    type: Type
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Call:
    """`softcap`, `alibi`, `min`, `max`, `abs`, `exp`, `log`, `tanh`, `sqrt` or `where`."""

    function: str
    arguments: tuple[Expression, ...]
    type: Type
    span: Span = field(default=_NOWHERE, compare=False, repr=False)


Expression = Constant | Name | Index | Unary | Binary | Call
