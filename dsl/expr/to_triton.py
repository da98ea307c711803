"""Expressions in Triton: typed, constants folded, rounding down as the language does it.

A value by row is a vector, a value by key another; both get their second axis where they meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsl.expr.alibi import series
from dsl.expr.intervals import Ranges, interval
from dsl.expr.statements import KEYS, ROWS, WORDS, Axes, Scope, Value, union
from dsl.expr.tree import Constant, Expression, Index, Type

_TYPES: Mapping[Type, str] = {"int32": "tl.int32", "int64": "tl.int64", "float": "tl.float32", "bool": "tl.int1"}
_SIGNS = {
    **{sign: sign for sign in ("+", "-", "*", "/", "==", "!=", "<", "<=", ">", ">=")},
    "and": "&",
    "or": "|",
}
_COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
_FUNCTIONS = {"abs": "tl.abs", "exp": "tl.exp", "log": "tl.log", "tanh": "_tanh", "sqrt": "tl.sqrt_rn"}
_SMALLEST_NORMAL = 2.0**-126
BOTH: Axes = frozenset((ROWS, KEYS))
_PLACES: Mapping[Axes, str] = {frozenset((ROWS,)): "[:, None]", frozenset((KEYS,)): "[None, :]"}


@dataclass(frozen=True, slots=True)
class TensorParam:
    """A tensor param in a kernel: its pointer, and the printed extent and stride of each axis."""

    name: str
    dtype: str
    extents: tuple[int | str, ...]
    strides: tuple[str, ...]


def placed(value: Value, axes: Axes) -> str:
    """The text of a value where it meets one of more axes."""
    return f"{value.text}{_PLACES[value.axes]}" if axes == BOTH and value.axes in _PLACES else value.text


@dataclass(frozen=True)
class Triton:
    """The dialect of Triton. `ranges` bounds names, so that no test is printed that cannot fail."""

    params: Mapping[str, TensorParam]
    ranges: Ranges
    heads: int

    def literal(self, constant: Constant) -> str:
        if constant.type == "bool":
            return f"tl.full([], {constant.value}, tl.int1)"
        if constant.type == "float":
            number = float(constant.value)
            # Triton takes a Python number that is no normal float32 for a float64.
            return f"tl.full([], {number!r}, tl.float32)" if 0 < abs(number) < _SMALLEST_NORMAL else repr(number)
        return repr(constant.value)

    def as_type(self, value: Value, kind: Type) -> Value:
        if value.type == kind:
            return value
        if value.constant is not None:
            number = float(value.constant) if kind == "float" else value.constant
            return Value(self.literal(Constant(number, kind)), kind, constant=number)
        return Value(f"{value.text}.to({_TYPES[kind]})", kind, value.axes)

    def operation(self, scope: Scope, operator: str, operands: tuple[Value, ...], kind: Type) -> Value:
        axes = union(operands)
        if operator == "alibi":
            return self._alibi(scope, operands[0])
        if operator in _COMPARISONS:
            common = widest(operands)
            operands = tuple(self.as_type(operand, common) for operand in operands)
        elif operator == "where":
            operands = (operands[0], *(self.as_type(operand, kind) for operand in operands[1:]))
        else:
            operands = tuple(self.as_type(operand, kind) for operand in operands)
        if operator in ("min", "max") and len(operands) > 2:
            operands = (self.operation(scope, operator, operands[:-1], kind), operands[-1])
        texts = tuple(placed(operand, axes) for operand in operands)
        return scope.assign(WORDS[operator], self._spell(scope, operator, operands, texts, kind), kind, axes)

    def _spell(
        self, scope: Scope, operator: str, operands: tuple[Value, ...], texts: tuple[str, ...], kind: Type
    ) -> str:
        if operator in _SIGNS:
            return f"{texts[0]} {_SIGNS[operator]} {texts[1]}"
        if operator in ("//", "%"):
            return _divided(operator, operands, texts, kind)
        if operator == "not":
            return f"~{texts[0]}"
        if operator == "negative":
            return f"-{texts[0]}"
        if operator == "where":
            return f"tl.where({', '.join(texts)})"
        if operator in ("min", "max"):
            return f"{'tl.minimum' if operator == 'min' else 'tl.maximum'}({texts[0]}, {texts[1]})"
        if operator == "softcap":
            return self._softcap(scope, operands, texts)
        return f"{_FUNCTIONS[operator]}({texts[0]})"

    def _softcap(self, scope: Scope, operands: tuple[Value, ...], texts: tuple[str, ...]) -> str:
        cap = operands[1].constant
        share = f"{texts[0]} / {texts[1]}"
        if cap is not None:
            share = f"{texts[0]} * {self.literal(Constant(1.0 / float(cap), 'float'))}"
        ratio = scope.assign("ratio", share, "float", union(operands))
        return f"_tanh({ratio.text}) * {texts[1]}"

    def _alibi(self, scope: Scope, head: Value) -> Value:
        """Slopes as powers of two of the head, run by run."""
        texts = []
        begin = 0
        for count, first, step in series(self.heads):
            place = head.text if begin == 0 else f"({head.text} - {begin})"
            exponent = scope.assign("exponent", f"{place} * {step!r} + {first!r}", "float", head.axes)
            texts.append(f"tl.exp2({exponent.text})")
            begin += count
        if len(texts) == 1:
            return scope.assign("slope", texts[0], "float", head.axes)
        power = series(self.heads)[0][0]
        return scope.assign("slope", f"tl.where({head.text} < {power}, {texts[0]}, {texts[1]})", "float", head.axes)

    def element(self, scope: Scope, index: Index, indices: tuple[Value, ...]) -> Value:
        """A load that never leaves the tensor: what lies outside is 0."""
        param = self.params[index.param]
        axes = union(indices)
        offsets, tests = [], []
        written = zip(index.indices, indices, param.extents, param.strides, strict=True)
        for expression, value, extent, stride in written:
            text = placed(value, axes)
            wide = value.axes != BOTH  # offsets by row and key are 32 bits wide: the launcher refuses larger tensors
            offsets.append(f"{_wide(value, text) if wide else text} * {stride}")
            tests += self._bounds(expression, placed(value, axes), extent)
        address = f"param_{param.name} + {' + '.join(offsets)}"
        is_float = index.type == "float"
        kind = ".to(tl.float32)" if is_float else ".to(tl.int1)" if index.type == "bool" else ""
        word = f"{param.name}_element"
        if not tests and len(address) > 60:
            return scope.assign(word, ("tl.load(", f"    {address},", f"){kind}"), index.type, axes)
        if not tests:
            return scope.assign(word, f"tl.load({address}){kind}", index.type, axes)
        other = "0.0" if is_float else "0"
        lines = ("tl.load(", f"    {address},", f"    mask={' & '.join(tests)},", f"    other={other},", f"){kind}")
        return scope.assign(word, lines, index.type, axes)

    def _bounds(self, expression: Expression, text: str, extent: int | str) -> list[str]:
        """The tests that an index may fail."""
        found = interval(expression, self.ranges)
        tests = []
        if found.low < 0:
            tests.append(f"({text} >= 0)")
        if isinstance(extent, str) or found.high >= extent:
            tests.append(f"({text} < {extent})")
        return tests


def _wide(value: Value, text: str) -> str:
    """An offset of 64 bits."""
    if value.constant is not None:
        return text
    return text if value.type == "int64" else text.replace(value.text, f"{value.text}.to(tl.int64)", 1)


def widest(operands: tuple[Value, ...]) -> Type:
    """The type in which values are compared."""
    order: tuple[Type, ...] = ("bool", "int32", "int64", "float")
    return order[max(order.index(operand.type) for operand in operands)]


def _divided(operator: str, operands: tuple[Value, ...], texts: tuple[str, ...], kind: Type) -> str:
    """`//` and `%` that round down: Triton's own round to zero."""
    divisor = operands[1].constant
    is_power = divisor is not None and divisor > 0 and int(divisor) & (int(divisor) - 1) == 0
    if is_power and operator == "//":
        return f"{texts[0]} >> {int(divisor).bit_length() - 1}"  # type: ignore[arg-type]
    if is_power:
        return f"{texts[0]} & {int(divisor) - 1}"  # type: ignore[arg-type]
    function = "_floor_quotient" if operator == "//" else "_floor_remainder"
    typed = texts[1] if divisor is None else f"tl.full([], {divisor}, {_TYPES[kind]})"
    return f"{function}({texts[0]}, {typed})"
