"""What constants come to, as the language counts: `//` and `%` round down, integers have 32 bits, floats are fp32."""

from __future__ import annotations

import math
import operator

LARGEST_INTEGER = 2**31 - 1
LARGEST_FLOAT = (2 - 2**-23) * 2.0**127

Number = int | float | bool


class FoldError(Exception):
    """The constant has no value. The message says why."""


def fold_unary(sign: str, operand: Number) -> Number:
    return (not operand) if sign == "not" else _in_range(-operand)


def fold_binary(sign: str, left: Number, right: Number) -> Number:
    if sign in ("/", "//", "%") and right == 0:
        raise FoldError("division by zero")
    return _compute(_BINARY[sign], left, right)


def fold_call(function: str, arguments: list[Number]) -> Number:
    return _compute(_CALLS[function], *arguments)


def _compute(function, *arguments: Number) -> Number:
    try:
        return _in_range(function(*arguments))
    except OverflowError:
        raise FoldError("the constant is too large") from None
    except ZeroDivisionError:
        raise FoldError("division by zero") from None
    except ValueError:
        raise FoldError("the constant has no value") from None


def _in_range(value: Number) -> Number:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -LARGEST_INTEGER - 1 <= value <= LARGEST_INTEGER:
            raise FoldError(f"the constant {value} does not fit into 32 bits")
    elif not abs(value) <= LARGEST_FLOAT:
        raise FoldError("the constant is too large")
    return value


def _softcap(x: Number, cap: Number) -> float:
    return cap * math.tanh(x / cap)


_BINARY = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "and": lambda left, right: left and right,
    "or": lambda left, right: left or right,
}

_CALLS = {
    "softcap": _softcap,
    "min": min,
    "max": max,
    "abs": abs,
    "exp": math.exp,
    "log": math.log,
    "tanh": math.tanh,
    "sqrt": math.sqrt,
    "where": lambda condition, left, right: left if condition else right,
}
