"""Expressions in PyTorch, for the plain reference of a generated module.

Names are fields of `at`, tensors that broadcast to `[head, query, key]`; their types are those of the language.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsl.expr.scope import BUILT_INS
from dsl.expr.statements import KEYS, WORDS, Axes, Scope, Value, union
from dsl.expr.to_triton import widest
from dsl.expr.tree import Call, Constant, Expression, Index, Name, Type
from dsl.expr.visible import parts_of

_TYPES: Mapping[Type, str] = {
    "int32": "torch.int32",
    "int64": "torch.int64",
    "float": "torch.float32",
    "bool": "torch.bool",
}
_SIGNS = {
    **{sign: sign for sign in ("+", "-", "*", "/", "==", "!=", "<", "<=", ">", ">=")},
    "and": "&",
    "or": "|",
}
_COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
_ANY: Axes = frozenset((KEYS,))


def tensor(value: Value) -> str:
    """A value as a tensor: a literal becomes one."""
    if value.constant is None:
        return value.text
    return f"at.q.new_tensor({value.text}, dtype={_TYPES[value.type]})"


@dataclass(frozen=True)
class Torch:
    """The dialect of PyTorch. Every value is a tensor, but for literals."""

    heads: int

    def literal(self, constant: Constant) -> str:
        return repr(float(constant.value)) if constant.type == "float" else repr(constant.value)

    def as_type(self, value: Value, kind: Type) -> Value:
        if value.constant is not None:
            number = float(value.constant) if kind == "float" else value.constant
            return Value(self.literal(Constant(number, kind)), kind, value.axes, number)
        return value if value.type == kind else Value(f"{value.text}.to({_TYPES[kind]})", kind, value.axes)

    def operation(self, scope: Scope, operator: str, operands: tuple[Value, ...], kind: Type) -> Value:
        if operator in _COMPARISONS:
            operands = tuple(self.as_type(operand, widest(operands)) for operand in operands)
        elif operator == "where":
            operands = (operands[0], *(self.as_type(operand, kind) for operand in operands[1:]))
        elif operator != "alibi":
            operands = tuple(self.as_type(operand, kind) for operand in operands)
        if operator in ("min", "max") and len(operands) > 2:
            operands = (self.operation(scope, operator, operands[:-1], kind), operands[-1])
        return scope.assign(WORDS[operator], self._spell(operator, operands, kind), kind, union(operands) | _ANY)

    def _spell(self, operator: str, operands: tuple[Value, ...], kind: Type) -> str:
        texts = [tensor(operand) if operand.type == "bool" else operand.text for operand in operands]
        if operator in _SIGNS:
            return f"{texts[0]} {_SIGNS[operator]} {texts[1]}"
        if operator == "//":
            return f"_floor_divide({texts[0]}, {tensor(operands[1])})"
        if operator == "%":
            return f"_floor_modulo({texts[0]}, {tensor(operands[1])})"
        if operator == "not":
            return f"~{texts[0]}"
        if operator == "negative":
            return f"-{texts[0]}"
        if operator == "where":
            condition, *branches = operands
            text = f"torch.where({tensor(condition)}, {branches[0].text}, {branches[1].text})"
            are_literals = all(branch.constant is not None for branch in branches)
            return f"{text}.to({_TYPES[kind]})" if are_literals else text
        if operator in ("min", "max"):
            function = "torch.minimum" if operator == "min" else "torch.maximum"
            return f"{function}({tensor(operands[0])}, {tensor(operands[1])})"
        if operator == "softcap":
            return f"torch.tanh({texts[0]} / {texts[1]}) * {texts[1]}"
        if operator == "alibi":
            return f"_alibi({texts[0]})"
        return f"torch.{operator}({texts[0]})"

    def element(self, scope: Scope, index: Index, indices: tuple[Value, ...]) -> Value:
        written = ", ".join(tensor(value) for value in indices)
        text = f'_element(at.params["{index.param}"], {written})'
        if index.type == "float":
            text += ".float()"
        return scope.assign(f"{index.param}_element", text, index.type, _ANY)


@dataclass(frozen=True, slots=True)
class TorchFunction:
    """The lines of a function's body: statements, and the value that it returns."""

    lines: tuple[str, ...]
    result: str


def torch_outside(
    expressions: Sequence[Expression],
    heads: int,
    numbers: Mapping[str, Type],
    axes: Mapping[str, tuple[str | int, ...]],
) -> TorchFunction | None:
    """Where a branch that is taken reads a param at an index outside of it, as a function of `at`; None for nowhere."""
    scope = _scope(heads, numbers)
    found: list[str] = []
    for expression in expressions:
        _find_outside(scope, expression, (), axes, found)
    if not found:
        return None
    for number, test in enumerate(found):
        scope.statements.append(f"outside = {f'outside | ({test})' if number else test}")
    return TorchFunction(tuple(scope.statements), "outside")


def _find_outside(
    scope: Scope,
    expression: Expression,
    taken: tuple[str, ...],
    axes: Mapping[str, tuple[str | int, ...]],
    found: list[str],
) -> None:
    if isinstance(expression, Call) and expression.function == "where":
        condition, left, right = expression.arguments
        _find_outside(scope, condition, taken, axes, found)
        for branch, sign in ((left, ""), (right, "~")):
            if _misses(branch, axes):
                test = f"{sign}{tensor(scope.print(condition))}"
                _find_outside(scope, branch, (*taken, test), axes, found)
        return
    for part in parts_of(expression):
        _find_outside(scope, part, taken, axes, found)
    if _is_miss(expression, axes):
        assert isinstance(expression, Index)
        indices = ", ".join(tensor(scope.print(index)) for index in expression.indices)
        test = scope.assign("misses", f'_is_outside(at.params["{expression.param}"], {indices})', "bool", _ANY)
        found.append(" & ".join((*taken, test.text)))


def _misses(expression: Expression, axes: Mapping[str, tuple[str | int, ...]]) -> bool:
    """Whether some param in an expression may be read outside of it."""
    return _is_miss(expression, axes) or any(_misses(part, axes) for part in parts_of(expression))


def _is_miss(expression: Expression, axes: Mapping[str, tuple[str | int, ...]]) -> bool:
    return isinstance(expression, Index) and any(map(_may_miss, expression.indices, axes[expression.param]))


def _may_miss(index: Expression, axis: str | int) -> bool:
    """A name that numbers the axis itself never lies outside; a key may, where a table holds more than a param."""
    own = {"head": "h", "seq": "b"}.get(str(axis), str(axis))
    return axis == "kv_token" or not (isinstance(index, Name) and index.name == own)


def torch_function(expression: Expression, heads: int, numbers: Mapping[str, Type], kind: Type) -> TorchFunction:
    """An expression as a function of `at`. `numbers` are the params that are numbers."""
    scope = _scope(heads, numbers)
    value = scope.dialect.as_type(scope.print(expression), kind)
    return TorchFunction(tuple(scope.statements), tensor(value))


def _scope(heads: int, numbers: Mapping[str, Type]) -> Scope:
    names = {name: Value(f"at.{name}", kind, _ANY) for name, kind in BUILT_INS.items()}
    return Scope(Torch(heads), {**names, **{n: Value(f'at.params["{n}"]', k, _ANY) for n, k in numbers.items()}}, {})
