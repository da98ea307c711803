"""Expressions as statements of their own: one named operation a line, an equal operation once.

What differs between languages is a `Dialect`; how values broadcast is known here, by the axes that they have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dsl.expr.tree import Binary, Call, Constant, Expression, Index, Name, Type, Unary

ROWS, KEYS = "rows", "keys"
Axes = frozenset[str]
SCALAR: Axes = frozenset()

WORDS: Mapping[str, str] = {
    "+": "total",
    "-": "difference",
    "*": "product",
    "/": "ratio",
    "//": "quotient",
    "%": "remainder",
    "==": "is_equal",
    "!=": "is_unequal",
    "<": "is_below",
    "<=": "is_at_most",
    ">": "is_above",
    ">=": "is_at_least",
    "and": "both",
    "or": "either",
    "not": "is_not",
    "negative": "negative",
    "softcap": "capped",
    "alibi": "slope",
    "min": "least",
    "max": "most",
    "abs": "size",
    "exp": "power",
    "log": "logarithm",
    "tanh": "tangent",
    "sqrt": "root",
    "where": "choice",
}
"""What the result of an operation is called."""


@dataclass(frozen=True, slots=True)
class Value:
    """A printed value: a name or a literal, its type, and which axes it has."""

    text: str
    type: Type
    axes: Axes = SCALAR
    constant: int | float | bool | None = None


@dataclass(frozen=True, slots=True)
class Computed:
    """What a name stands for, where it takes a statement of its own: `word = expression`."""

    word: str
    expression: str
    type: Type
    axes: Axes = SCALAR


class Dialect(Protocol):
    """How one language spells an operation."""

    def literal(self, constant: Constant) -> str: ...

    def as_type(self, value: Value, kind: Type) -> Value: ...

    def operation(self, scope: Scope, operator: str, operands: tuple[Value, ...], kind: Type) -> Value: ...

    def element(self, scope: Scope, index: Index, indices: tuple[Value, ...]) -> Value: ...


@dataclass
class Scope:
    """Statements in order, and what is known by name in them. A scope may stand in another, whose values it sees.

    An inner scope hands to the outer one what does not change in it: values without a key and without the score.
    """

    dialect: Dialect
    names: Mapping[str, Value | Computed]
    shapes: Mapping[Axes, str]
    outer: Scope | None = None
    statements: list[str] = field(default_factory=list)
    known: dict[tuple[str, Type], Value] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    prefix: str = ""

    def inner(self, prefix: str = "") -> Scope:
        """A scope inside this one. Without a prefix for its names, the outer one may name nothing more."""
        return Scope(self.dialect, self.names, self.shapes, self, taken=dict(self.taken), prefix=prefix)

    def print(self, expression: Expression) -> Value:
        """Print what an expression needs, and return its value."""
        match expression:
            case Constant(value, kind):
                return Value(self.dialect.literal(expression), kind, constant=value)
            case Name(name):
                return self.name(name)
            case Index(_, indices):
                return self.dialect.element(self, expression, tuple(self.print(index) for index in indices))
            case Unary("not", operand):
                return self.dialect.operation(self, "not", (self.print(operand),), "bool")
            case Unary(_, operand, kind):
                return self.dialect.operation(self, "negative", (self.print(operand),), kind)
            case Binary(operator, left, right, kind):
                return self.dialect.operation(self, operator, (self.print(left), self.print(right)), kind)
            case Call(function, arguments, kind):
                operands = tuple(self.print(argument) for argument in arguments)
                return self.dialect.operation(self, function, operands, kind)
        raise TypeError(f"not an expression: {expression!r}")

    def name(self, name: str) -> Value:
        """What a name stands for; where that is computed, it is printed with its first use."""
        found = self.names[name]
        return (
            self.assign(found.word, found.expression, found.type, found.axes) if isinstance(found, Computed) else found
        )

    def assign(self, word: str, expression: str | tuple[str, ...], kind: Type, axes: Axes) -> Value:
        """A value of its own line; the one that is there already where the same was printed before."""
        home = self.outer if self.outer is not None and KEYS not in axes else self
        lines = (expression,) if isinstance(expression, str) else expression
        key = ("\n".join(lines), kind)
        for scope in (home, home.outer):
            if scope is not None and key in scope.known:
                return scope.known[key]
        home.taken[word] = number = home.taken.get(word, 0) + 1
        name = f"{home.prefix}{word}" if number == 1 else f"{home.prefix}{word}_{number}"
        shape = self.shapes.get(axes)
        comment = f"  # {shape}" if shape else ""
        home.statements += [f"{name} = {lines[0]}", *lines[1:]]
        home.statements[-1] += comment
        value = home.known[key] = Value(name, kind, axes)
        return value

    def comment(self, text: str) -> None:
        self.statements.append(f"# {text}")


def union(values: tuple[Value, ...]) -> Axes:
    """The axes of a result."""
    return frozenset().union(*(value.axes for value in values))
