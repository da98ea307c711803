"""Interval arithmetic on expressions: between which integers a value lies, and whether a condition may or must hold.

Exact for integers as the language computes them: where a result may leave its type's bits it wraps, so nothing is known
but the type. A float, and what is read from a tensor, may be anything of its type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from dsl.expr.tree import Binary, Call, Constant, Expression, Index, Name, Unary

BITS: Mapping[str, int] = {"int32": 32, "int64": 64}


@dataclass(frozen=True, slots=True)
class Interval:
    """The integers from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        assert self.low <= self.high, "an interval holds a value"

    def holds(self, other: Interval) -> bool:
        """Whether all of another interval lies in this one."""
        return self.low <= other.low and other.high <= self.high


@dataclass(frozen=True, slots=True)
class Truth:
    """What is known of a condition: whether it `may` hold at all, and whether it `must` hold always."""

    may: bool
    must: bool

    @property
    def negated(self) -> Truth:
        return Truth(not self.must, not self.may)


ALWAYS, NEVER, PERHAPS = Truth(True, True), Truth(False, False), Truth(True, False)

Ranges = Mapping[str, Interval]
"""What is known of each name. A name that is left out may be anything of its type."""


def of_type(kind: str) -> Interval:
    """Everything that an integer type holds."""
    half = 1 << (BITS[kind] - 1)
    return Interval(-half, half - 1)


def interval(expression: Expression, ranges: Ranges) -> Interval:
    """Between which integers an integer expression lies."""
    found = unwrapped(expression, ranges)
    everything = of_type(expression.type)
    return everything if found is None or not everything.holds(found) else found


def fits(expression: Expression, ranges: Ranges) -> bool:
    """Whether an integer expression is known to be computed without a wrap, at its outermost operator."""
    found = unwrapped(expression, ranges)
    return found is not None and of_type(expression.type).holds(found)


def unwrapped(expression: Expression, ranges: Ranges) -> Interval | None:
    """The interval of the outermost operator's true result; None where nothing is known."""
    match expression:
        case Constant(value):
            return Interval(int(value), int(value))
        case Name(name, kind):
            return ranges.get(name, of_type(kind))
        case Unary("-", operand):
            inner = interval(operand, ranges)
            return Interval(-inner.high, -inner.low)
        case Binary(operator, left, right):
            return _binary(operator, interval(left, ranges), interval(right, ranges))
        case Call(function, arguments):
            return _call(function, arguments, ranges)
        case Index():
            return of_type(expression.type)
    return None


def _binary(operator: str, left: Interval, right: Interval) -> Interval | None:
    if operator == "+":
        return Interval(left.low + right.low, left.high + right.high)
    if operator == "-":
        return Interval(left.low - right.high, left.high - right.low)
    if operator == "*":
        return _hull(a * b for a, b in product((left.low, left.high), (right.low, right.high)))
    if right.low <= 0:
        return None
    if operator == "//":
        return _hull(a // b for a, b in product((left.low, left.high), (right.low, right.high)))
    if operator == "%":
        is_one_turn = right.low == right.high and left.low // right.low == left.high // right.low
        if is_one_turn:
            return Interval(left.low % right.low, left.high % right.low)
        return Interval(0, right.high - 1 if left.low < 0 else min(left.high, right.high - 1))
    return None


def _call(function: str, arguments: tuple[Expression, ...], ranges: Ranges) -> Interval | None:
    if function == "where":
        truth = known(arguments[0], ranges)
        taken = [
            interval(branch, ranges)
            for branch, is_possible in ((arguments[1], truth.may), (arguments[2], not truth.must))
            if is_possible
        ]
        return _hull(end for found in taken for end in (found.low, found.high))
    found = [interval(argument, ranges) for argument in arguments]
    if function == "min":
        return Interval(min(each.low for each in found), min(each.high for each in found))
    if function == "max":
        return Interval(max(each.low for each in found), max(each.high for each in found))
    if function == "abs":
        (inner,) = found
        if inner.low >= 0:
            return inner
        return Interval(max(0, -inner.high), max(-inner.low, inner.high))
    return None


def known(condition: Expression, ranges: Ranges) -> Truth:
    """Whether a condition may hold, and whether it must."""
    match condition:
        case Constant(value):
            return ALWAYS if value else NEVER
        case Unary("not", operand):
            return known(operand, ranges).negated
        case Binary("and", left, right):
            a, b = known(left, ranges), known(right, ranges)
            return Truth(a.may and b.may, a.must and b.must)
        case Binary("or", left, right):
            a, b = known(left, ranges), known(right, ranges)
            return Truth(a.may or b.may, a.must or b.must)
        case Binary(operator, left, right) if left.type in BITS and right.type in BITS:
            return _comparison(operator, interval(left, ranges), interval(right, ranges))
        case Call("where", (test, taken, otherwise)):
            choice, a, b = known(test, ranges), known(taken, ranges), known(otherwise, ranges)
            may = (choice.may and a.may) or (not choice.must and b.may)
            return Truth(may, (not choice.may or a.must) and (choice.must or b.must))
    return PERHAPS


def _comparison(operator: str, left: Interval, right: Interval) -> Truth:
    if operator == "<=":
        return Truth(left.low <= right.high, left.high <= right.low)
    if operator == "<":
        return Truth(left.low < right.high, left.high < right.low)
    if operator in (">", ">="):
        return _comparison({">": "<", ">=": "<="}[operator], right, left)
    equal = Truth(
        left.low <= right.high and right.low <= left.high,
        left.low == left.high == right.low == right.high,
    )
    return equal if operator == "==" else equal.negated


def _hull(values: Iterable[int]) -> Interval:
    found = tuple(values)
    return Interval(min(found), max(found))
