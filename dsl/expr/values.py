"""What an expression comes to for one row and one key, in plain Python: for pictures and for tests.

Integers wrap as wide as their type, floats are Python's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from dsl.expr.intervals import BITS
from dsl.expr.tree import Binary, Call, Constant, Expression, Index, Name, Unary

Number = int | float | bool
Element = Callable[[str, tuple[int, ...]], Number]

_COMPARISONS = {
    "==": lambda left, right: left == right,
    "!=": lambda left, right: left != right,
    "<": lambda left, right: left < right,
    "<=": lambda left, right: left <= right,
    ">": lambda left, right: left > right,
    ">=": lambda left, right: left >= right,
}


def value(expression: Expression, names: Mapping[str, Number], element: Element) -> Number:
    """The value, where `names` says what names stand for and `element` what a tensor param holds at some indices."""

    def visit(part: Expression) -> Number:
        return _wrapped(compute(part), part.type)

    def compute(part: Expression) -> Number:
        match part:
            case Constant(number):
                return number
            case Name(name):
                return names[name]
            case Index(param, indices):
                return element(param, tuple(int(visit(index)) for index in indices))
            case Unary("not", operand):
                return not visit(operand)
            case Unary("-", operand):
                return -visit(operand)
            case Binary("and", left, right):
                return bool(visit(left)) and bool(visit(right))
            case Binary("or", left, right):
                return bool(visit(left)) or bool(visit(right))
            case Binary(operator, left, right) if operator in _COMPARISONS:
                return _COMPARISONS[operator](visit(left), visit(right))
            case Binary(operator, left, right):
                return _arithmetic(operator, visit(left), visit(right))
            case Call(function, arguments):
                return _call(function, [visit(argument) for argument in arguments])
        raise TypeError(f"not an expression: {part!r}")

    return visit(expression)


def _arithmetic(operator: str, left: Number, right: Number) -> Number:
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    if operator == "/":
        return left / right if right else math.nan if not left else math.copysign(math.inf, left)
    if not right:
        return 0
    return left // right if operator == "//" else left % right


def _call(function: str, arguments: list[Number]) -> Number:
    if function == "where":
        return arguments[1] if arguments[0] else arguments[2]
    if function in ("min", "max"):
        return min(arguments) if function == "min" else max(arguments)
    if function == "abs":
        return abs(arguments[0])
    if function == "softcap":
        return arguments[1] * math.tanh(arguments[0] / arguments[1])
    return {"exp": math.exp, "log": math.log, "tanh": math.tanh, "sqrt": math.sqrt}[function](arguments[0])


def _wrapped(number: Number, kind: str) -> Number:
    if kind not in BITS:
        return float(number) if kind == "float" else bool(number)
    half = 1 << (BITS[kind] - 1)
    return (int(number) + half) % (2 * half) - half
