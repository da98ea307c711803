"""The oracle's evaluator: a typed expression over tensors, integers as wide as the language says, floats in fp64.

A float that fp32 cannot hold becomes an infinity here as well, so that an expression overflows in one place as in the
other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dsl.expr.tree import Binary, Call, Constant, Expression, Index, Name, Unary

_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float": torch.float64, "bool": torch.bool}
_FLOAT32_MAX = torch.finfo(torch.float32).max

_COMPARISONS = {
    "==": torch.eq,
    "!=": torch.ne,
    "<": torch.lt,
    "<=": torch.le,
    ">": torch.gt,
    ">=": torch.ge,
}
_ARITHMETIC = {"+": torch.add, "-": torch.sub, "*": torch.mul, "/": torch.div}
_FLOAT_FUNCTIONS = {"exp": torch.exp, "log": torch.log, "tanh": torch.tanh, "sqrt": torch.sqrt}


@dataclass(frozen=True)
class Scope:
    """What names stand for. `names` maps built-ins and scalar params to tensors or numbers that broadcast together."""

    names: Mapping[str, torch.Tensor | int | float | bool]
    tensors: Mapping[str, torch.Tensor]
    heads: int
    device: torch.device


def evaluate(expression: Expression, scope: Scope) -> torch.Tensor:
    """The expression's value, of its own type, broadcast as far as the names in it ask for."""
    match expression:
        case Constant(value, kind):
            return torch.tensor(value, dtype=_DTYPES[kind], device=scope.device)
        case Name(name, kind):
            return torch.as_tensor(scope.names[name], device=scope.device).to(_DTYPES[kind])
        case Index(param, indices, kind):
            return _element(scope.tensors[param], [evaluate(index, scope) for index in indices]).to(_DTYPES[kind])
        case Unary("not", operand):
            return torch.logical_not(evaluate(operand, scope))
        case Unary("-", operand, kind):
            return torch.neg(evaluate(operand, scope).to(_DTYPES[kind]))
        case Binary():
            return _binary(expression, scope)
        case Call():
            return _call(expression, scope)
    raise TypeError(f"not an expression: {expression!r}")


def alibi_slopes(heads: int) -> list[float]:
    """The standard slopes. Past the largest power of two, every second slope of the next one fills up."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    return slopes + [2.0 ** (-8.0 * (2 * i + 1) / (2 * power)) for i in range(heads - power)]


def _element(tensor: torch.Tensor, indices: list[torch.Tensor]) -> torch.Tensor:
    """`tensor[indices]`, 0 wherever an index lies outside."""
    indices = list(torch.broadcast_tensors(*indices))
    inside = torch.ones_like(indices[0], dtype=torch.bool)
    for index, extent in zip(indices, tensor.shape, strict=True):
        inside &= (index >= 0) & (index < extent)
    if tensor.numel() == 0:
        return torch.zeros_like(indices[0], dtype=tensor.dtype)
    safe = [torch.where(inside, index, 0).long() for index in indices]
    value = tensor[tuple(safe)]
    return torch.where(inside, value, torch.zeros((), dtype=value.dtype, device=value.device))


def _binary(expression: Binary, scope: Scope) -> torch.Tensor:
    operator = expression.operator
    left, right = evaluate(expression.left, scope), evaluate(expression.right, scope)
    if operator == "and":
        return left & right
    if operator == "or":
        return left | right
    if operator in _COMPARISONS:
        common = torch.promote_types(left.dtype, right.dtype)
        return _COMPARISONS[operator](left.to(common), right.to(common))
    dtype = _DTYPES[expression.type]
    left, right = left.to(dtype), right.to(dtype)
    if operator == "//":
        return _floor_divide(left, right)
    if operator == "%":
        return torch.where(right == 0, 0, left - _floor_divide(left, right) * right)
    return _as_float32_range(_ARITHMETIC[operator](left, right))


def _floor_divide(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Rounds down, gives 0 where the divisor is 0, and wraps at the one quotient that overflows."""
    ordinary = (right != 0) & (right != -1)
    quotient = torch.div(left, torch.where(ordinary, right, 1), rounding_mode="floor")
    return torch.where(right == 0, 0, torch.where(right == -1, torch.neg(left), quotient))


def _call(expression: Call, scope: Scope) -> torch.Tensor:
    dtype = _DTYPES[expression.type]
    arguments = [evaluate(argument, scope) for argument in expression.arguments]
    match expression.function:
        case "where":
            condition, taken, otherwise = arguments
            return torch.where(condition, taken.to(dtype), otherwise.to(dtype))
        case "alibi":
            slopes = torch.tensor(alibi_slopes(scope.heads), dtype=torch.float64, device=scope.device)
            return _element(slopes, arguments)
        case "softcap":
            value, cap = (argument.to(dtype) for argument in arguments)
            return _as_float32_range(cap * torch.tanh(value / cap))
        case "abs":
            return torch.abs(arguments[0].to(dtype))
        case "min" | "max":
            pick = torch.minimum if expression.function == "min" else torch.maximum
            result = arguments[0].to(dtype)
            for argument in arguments[1:]:
                result = pick(*torch.broadcast_tensors(result, argument.to(dtype)))
            return result
        case function:
            return _as_float32_range(_FLOAT_FUNCTIONS[function](arguments[0].to(dtype)))


def _as_float32_range(value: torch.Tensor) -> torch.Tensor:
    if value.dtype != torch.float64:
        return value
    return torch.where(value.abs() > _FLOAT32_MAX, torch.copysign(torch.full_like(value, math.inf), value), value)
