"""From a written expression to the typed tree: names, types, and the values of constants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dsl import nodes
from dsl.diagnostics import near, quote
from dsl.expr.fold import FoldError, fold_binary, fold_call, fold_unary
from dsl.expr.scope import ALIASES, BUILT_INS, CONSTANTS, FUNCTIONS, NAMES_OF_FIELD
from dsl.expr.tree import Binary, Call, Constant, Expression, Index, Name, Type, Unary
from dsl.source import Span
from dsl.spec import Param

LARGEST_WEIGHT = 4096

Report = Callable[..., None]

_INTEGERS = ("int32", "int64")
_NUMBERS = ("int32", "int64", "float")
_WORDS: Mapping[Type, str] = {
    "int32": "an integer",
    "int64": "an integer",
    "float": "a float",
    "bool": "a condition",
}
_ARGUMENTS: Mapping[str, tuple[int, int | None]] = {
    "softcap": (2, 2),
    "alibi": (1, 1),
    "min": (2, None),
    "max": (2, None),
    "abs": (1, 1),
    "exp": (1, 1),
    "log": (1, 1),
    "tanh": (1, 1),
    "sqrt": (1, 1),
    "where": (3, 3),
}


def param_type(param: Param) -> Type:
    """The type of a param's elements in expressions."""
    return param.dtype if param.dtype in ("int32", "int64", "bool") else "float"


def type_expression(
    value: nodes.Value, field: str, params: Mapping[str, Param], unknown: Iterable[str], report: Report
) -> Expression | None:
    """The typed tree of a field's value, or None where `report` was told what is wrong with it.

    `unknown` names are silent: what is wrong with them has been said elsewhere.
    """
    if _weight(value) > LARGEST_WEIGHT:
        report("ATTN410", value.span, f"the expression has more than {LARGEST_WEIGHT} parts")
        return None
    return _Typer(field, params, frozenset(unknown), report).visit(value)


def _weight(value: nodes.Value) -> int:
    """How many nodes the typed tree will have; the middle of a chain counts twice, for it is compared twice."""
    if isinstance(value, nodes.Chain):
        weights = [_weight(operand) for operand in value.operands]
        return sum(weights) + sum(weights[1:-1]) + 2 * len(value.operators)
    return 1 + sum(_weight(part) for part in _parts(value))


def _parts(value: nodes.Value) -> tuple[nodes.Value, ...]:
    if isinstance(value, nodes.Binary):
        return value.left, value.right
    if isinstance(value, nodes.Unary):
        return (value.operand,)
    if isinstance(value, nodes.Call):
        return tuple(argument.value for argument in value.arguments)
    if isinstance(value, nodes.Index):
        return value.indices.items
    return ()


class _Typer:
    """One walk over one expression. A visit returns None where an error was reported below it."""

    def __init__(self, field: str, params: Mapping[str, Param], unknown: frozenset[str], report: Report) -> None:
        self.field = field
        self.params = params
        self.unknown = unknown
        self.report = report
        self.names = NAMES_OF_FIELD[field]

    def visit(self, value: nodes.Value) -> Expression | None:
        return _VISITS.get(type(value), _Typer.other)(self, value)

    def number(self, value: nodes.Number) -> Expression:
        return Constant(value.value, "float" if isinstance(value.value, float) else "int32", value.span)

    def name(self, value: nodes.Name) -> Expression | None:
        text = ALIASES.get(value.text, value.text)
        if text in ("true", "false"):
            return Constant(text == "true", "bool", value.span)
        if text == "causal" and "q" in self.names:
            kv, q = Name("kv", "int32", value.span), Name("q", "int32", value.span)
            return Binary("<=", kv, q, "bool", value.span)
        if text in self.names:
            return Name(text, BUILT_INS[text], value.span)
        if text in self.params:
            return self._param(value, self.params[text])
        if text not in self.unknown:
            self._unknown(value)
        return None

    def _param(self, value: nodes.Name, param: Param) -> Expression | None:
        if param.axes is None:
            return Name(param.name, param_type(param), value.span)
        axes = ", ".join(str(axis) for axis in param.axes)
        self.report("ATTN407", value.span, f"{quote(param.name)} is a tensor", f"index it: `{param.name}[{axes}]`")
        return None

    def _unknown(self, value: nodes.Name) -> None:
        text = value.text
        if text in BUILT_INS or text in ALIASES or text == "causal":
            advice = f"it may use {', '.join(self.names)} and params" if self.names else "it is a constant or a param"
            self.report("ATTN402", value.span, f"{quote(text)} may not be used in `{self.field}`", advice)
        elif text in FUNCTIONS:
            self.report("ATTN405", value.span, f"{quote(text)} is a function", f"write `{text}(...)`")
        else:
            known = [*self.names, *CONSTANTS, *self.params]
            self.report("ATTN401", value.span, f"there is no name {quote(text)}", near(text, known))

    def index(self, value: nodes.Index) -> Expression | None:
        written = [self._integer(item) for item in value.indices.items]
        indices = [index for index in written if index is not None]
        text = value.name.text
        param = self.params.get(text)
        if param is None or param.axes is None:
            self._no_tensor(value.name)
            return None
        if len(written) != len(param.axes):
            axes = ", ".join(str(axis) for axis in param.axes)
            message = f"{quote(text)} has {_count(len(param.axes), 'axis', 'axes')}, not {len(written)}"
            self.report("ATTN407", value.indices.span, message, f"it is declared as `{text}[{axes}]`")
            return None
        return Index(text, tuple(indices), param_type(param), value.span) if len(indices) == len(written) else None

    def _no_tensor(self, name: nodes.Name) -> None:
        text = name.text
        if text in self.params or text in BUILT_INS or text in ALIASES:
            self.report("ATTN407", name.span, f"{quote(text)} is a number and cannot be indexed")
        elif text not in self.unknown:
            advice = f"call it: `{text}(...)`" if text in FUNCTIONS else near(text, self.params)
            self.report("ATTN401", name.span, f"there is no tensor param {quote(text)}", advice)

    def _integer(self, item: nodes.Value) -> Expression | None:
        found = self.visit(item)
        if found is not None and found.type not in _INTEGERS:
            self.report("ATTN403", item.span, f"an index is an integer, not {_WORDS[found.type]}")
            return None
        return found

    def unary(self, value: nodes.Unary) -> Expression | None:
        operand = self.visit(value.operand)
        if operand is None:
            return None
        sign: Any = value.operator.text
        if (sign == "not") != (operand.type == "bool"):
            takes = "a condition" if sign == "not" else "a number"
            message = f"`{sign}` takes {takes}, not {_WORDS[operand.type]}"
            self.report("ATTN403", value.operator.span, message)
            return None
        if isinstance(operand, Constant):
            return self._fold(value.operator.span, operand.type, value.span, fold_unary, sign, operand.value)
        return Unary(sign, operand, operand.type, value.span)

    def binary(self, value: nodes.Binary) -> Expression | None:
        left, right = self.visit(value.left), self.visit(value.right)
        return None if left is None or right is None else self._binary(value.operator, left, right, value.span)

    def chain(self, value: nodes.Chain) -> Expression | None:
        """`a < b < c` is `a < b and b < c`."""
        operands = [self.visit(operand) for operand in value.operands]
        result = None
        for operator, left, right in zip(value.operators, operands, operands[1:], strict=False):
            if left is None or right is None:
                return None
            link = self._binary(operator, left, right, left.span.to(right.span))
            if link is None:
                return None
            conjunction = nodes.Operator("and", operator.span)
            result = link if result is None else self._binary(conjunction, result, link, value.span)
        return result

    def _binary(self, operator: nodes.Operator, left: Expression, right: Expression, span: Span) -> Expression | None:
        sign: Any = operator.text
        result = _result(sign, left.type, right.type)
        if result is None:
            message, advice = _mismatch(sign, left.type, right.type)
            self.report("ATTN403", operator.span, message, advice)
            return None
        if isinstance(left, Constant) and isinstance(right, Constant):
            return self._fold(operator.span, result, span, fold_binary, sign, left.value, right.value)
        if sign in ("/", "//", "%") and isinstance(right, Constant) and right.value == 0:
            self.report("ATTN408", operator.span, "division by zero")
            return None
        return Binary(sign, left, right, result, span)

    def call(self, value: nodes.Call) -> Expression | None:
        function, place = value.function.text, value.function.span
        named = next((argument.keyword for argument in value.arguments if argument.keyword), None)
        written = [self.visit(argument.value) for argument in value.arguments]
        arguments = [argument for argument in written if argument is not None]
        if function not in FUNCTIONS:
            advice = f"index a param with `{quote(function, ticks=False)}[...]`" if function in self.params else None
            message = f"there is no function {quote(function)}"
            self.report("ATTN405", place, message, advice or near(function, FUNCTIONS))
        elif named is not None:
            self.report("ATTN406", named.span, f"the arguments of `{function}` have no names")
        elif not _takes(function, len(written)):
            self.report("ATTN406", place, f"`{function}` takes {_signature(function)}, not {len(written)}")
        elif len(arguments) == len(written):
            return self._call(value, function, arguments)
        return None

    def _call(self, value: nodes.Call, function: str, arguments: list[Expression]) -> Expression | None:
        result = self._result_of_call(value, function, arguments)
        if result is None:
            return None
        if function == "softcap" and isinstance(arguments[1], Constant) and arguments[1].value <= 0:
            self.report("ATTN406", value.arguments[1].value.span, "a cap is greater than 0")
            return None
        constants = [argument.value for argument in arguments if isinstance(argument, Constant)]
        if len(constants) == len(arguments):
            return self._fold(value.function.span, result, value.span, fold_call, function, constants)
        return Call(function, tuple(arguments), result, value.span)

    def _result_of_call(self, value: nodes.Call, function: str, arguments: list[Expression]) -> Type | None:
        if function == "alibi" and not (isinstance(arguments[0], Name) and arguments[0].name == "h"):
            self.report("ATTN406", value.arguments[0].value.span, "`alibi` takes the query head", "write `alibi(h)`")
            return None
        if function == "where":
            return self._where(value, arguments)
        for argument, written in zip(arguments, value.arguments, strict=True):
            if argument.type == "bool":
                self.report("ATTN406", written.value.span, f"`{function}` takes numbers, not a condition")
                return None
        if function in ("min", "max", "abs"):
            return _widest(argument.type for argument in arguments)
        return "float"

    def _where(self, value: nodes.Call, arguments: list[Expression]) -> Type | None:
        condition, left, right = arguments
        if condition.type != "bool":
            message = f"the first argument of `where` is a condition, not {_WORDS[condition.type]}"
            self.report("ATTN406", value.arguments[0].value.span, message)
            return None
        if (left.type == "bool") != (right.type == "bool"):
            message = f"the branches of `where` differ: {_WORDS[left.type]} and {_WORDS[right.type]}"
            self.report("ATTN406", value.arguments[2].value.span, message)
            return None
        return "bool" if left.type == "bool" else _widest((left.type, right.type))

    def other(self, value: nodes.Value) -> None:
        what = "a list" if isinstance(value, nodes.List) else "`per`"
        self.report("ATTN409", value.span, f"{what} is no part of an expression")

    def _fold(self, place: Span, result: Type, span: Span, fold: Callable, *operands: object) -> Constant | None:
        try:
            value = fold(*operands)
        except FoldError as error:
            self.report("ATTN408", place, str(error))
            return None
        return Constant(float(value) if result == "float" else value, result, span)


_VISITS = {
    nodes.Number: _Typer.number,
    nodes.Name: _Typer.name,
    nodes.Index: _Typer.index,
    nodes.Unary: _Typer.unary,
    nodes.Binary: _Typer.binary,
    nodes.Chain: _Typer.chain,
    nodes.Call: _Typer.call,
}


def _widest(types: Iterable[Type]) -> Type:
    return max(types, key=_NUMBERS.index)


def _result(sign: str, left: Type, right: Type) -> Type | None:
    """The type of `left sign right`, or None where they do not go together."""
    conditions = (left == "bool") + (right == "bool")
    if sign in ("and", "or"):
        return "bool" if conditions == 2 else None
    if sign in ("==", "!=") and conditions == 2:
        return "bool"
    if conditions:
        return None
    if sign in ("==", "!=", "<", "<=", ">", ">="):
        return "bool"
    if sign == "/":
        return "float"
    if sign in ("//", "%") and "float" in (left, right):
        return None
    return _widest((left, right))


def _mismatch(sign: str, left: Type, right: Type) -> tuple[str, str | None]:
    found = f"{_WORDS[left]} and {_WORDS[right]}"
    if sign in ("and", "or"):
        return f"`{sign}` takes two conditions, not {found}", "a number becomes a condition by a comparison"
    if sign in ("//", "%") and "bool" not in (left, right):
        return f"`{sign}` takes two integers, not {found}", "`/` takes floats" if sign == "//" else None
    if sign in ("==", "!="):
        return f"`{sign}` cannot compare {found}", None
    advice = "a condition becomes a number by `where(condition, 1, 0)`"
    return f"`{sign}` takes two numbers, not {found}", advice


def _takes(function: str, count: int) -> bool:
    least, most = _ARGUMENTS[function]
    return least <= count and (most is None or count <= most)


def _signature(function: str) -> str:
    least, most = _ARGUMENTS[function]
    return _count(least, "argument", "arguments") if most is not None else f"{least} or more arguments"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
