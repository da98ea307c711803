"""From a checked spec back to text that means the same, with everything written out that is not a default."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dsl.check.layouts import DEFAULT_AXES
from dsl.expr.tree import Binary, Call, Constant, Expression, Index, Name, Unary
from dsl.spec import Axis, Dispatch, Layout, Param, Spec, SpecFile, Split, Workload

_LEVELS = (("or",), ("and",), ("not",), ("==", "!=", "<", "<=", ">", ">="), ("+", "-"), ("*", "/", "//", "%"))
_LEVEL = {sign: level for level, signs in enumerate(_LEVELS) for sign in signs}
_NEGATION = len(_LEVELS)
_ATOM = _NEGATION + 1


def print_spec(file: SpecFile) -> str:
    """The text of a whole file. Parsed and checked, it is an equal SpecFile."""
    blocks = [print_attention(spec) for spec in file.attentions]
    blocks += [_dispatch(dispatch) for dispatch in file.dispatches]
    blocks += [_workload(workload, file.attention(workload.block)) for workload in file.workloads]
    return "\n".join(blocks)


def print_attention(spec: Spec) -> str:
    """The text of one block, without `from`."""
    fields = dict(_fields(spec))
    width = max(map(len, fields))
    lines = [f"    {name:<{width}} = {value}" for name, value in fields.items()]
    lines += [f"    {_param(param)}" for param in spec.params]
    return "\n".join((f"attention {spec.name} {{", *lines, "}\n"))


def print_expression(expression: Expression) -> str:
    """The expression with no more brackets than it needs."""
    return _expression(expression)[0]


def _fields(spec: Spec) -> Iterator[tuple[str, str]]:
    yield "query", spec.query if spec.query_max is None else f"{spec.query}(max = {spec.query_max})"
    yield "kv", spec.kv if spec.block is None else f"{spec.kv}(block = {spec.block})"
    yield "dtype", spec.dtype
    if spec.kv_scale_axes is not None:
        axes = ", ".join(spec.kv_scale_axes)
        yield "kv_dtype", f"{spec.kv_dtype} per [{axes}]" if axes else spec.kv_dtype
    yield "heads", _pair(spec.heads, spec.kv_heads)
    yield "head_dim", _pair(spec.head_dim_qk, spec.head_dim_v)
    yield from _layouts(spec)
    if spec.has_mask:
        yield "mask", print_expression(spec.mask)
    if spec.has_score:
        yield "score", print_expression(spec.score)
    if spec.sink is not None:
        yield "sink", print_expression(spec.sink)
    if spec.scale != 1 / math.sqrt(spec.head_dim_qk):
        yield "scale", spec.scale if isinstance(spec.scale, str) else _number(spec.scale)
    if spec.lse:
        yield "lse", "true"
    if spec.split != Split():
        yield "split", spec.split.kind if spec.split.keys is None else f"fixed({spec.split.keys})"
    if spec.softmax != "auto":
        yield "softmax", spec.softmax
    if spec.targets is not None:
        yield "targets", f"[{', '.join(spec.targets)}]"


def _pair(first: int, second: int) -> str:
    return str(first) if first == second else f"{first} / {second}"


def _layouts(spec: Spec) -> Iterator[tuple[str, str]]:
    layouts = (spec.q_layout, spec.k_layout, spec.v_layout, spec.out_layout)
    for (tensor, axes), layout in zip(DEFAULT_AXES[spec.family].items(), layouts, strict=True):
        if tensor == "v_cache" and spec.shared_kv:
            yield tensor, "k_cache"
        elif layout != tuple(Axis(axis) for axis in axes):
            yield tensor, _layout(layout)


def _layout(layout: Layout) -> str:
    return f"[{', '.join(map(str, layout))}]"


def _param(param: Param) -> str:
    axes = "" if param.axes is None else f"[{', '.join(map(str, param.axes))}]"
    return f"param {param.name}{axes} : {param.dtype}"


def _dispatch(dispatch: Dispatch) -> str:
    return f"dispatch {dispatch.name} = [{', '.join(dispatch.blocks)}]\n"


def _workload(workload: Workload, spec: Spec) -> str:
    columns = {
        "seqs": [str(len(case.kv_lens)) for case in workload.cases],
        "q_len": [_lengths(case.q_lens) for case in workload.cases],
        "kv_len": [_lengths(case.kv_lens) for case in workload.cases],
    }
    if spec.query == "single":
        del columns["q_len"]
    fields = "  ".join(f"{name} = [{', '.join(column)}]" for name, column in columns.items())
    return f"workload {workload.block} {{ {fields} }}\n"


def _lengths(lengths: tuple[int, ...]) -> str:
    if len(set(lengths)) == 1:
        return str(lengths[0])
    return f"[{', '.join(map(str, lengths))}]"


def _expression(expression: Expression) -> tuple[str, int]:
    """The text, and how tightly it holds together."""
    if isinstance(expression, Constant):
        return _constant(expression)
    if isinstance(expression, Name):
        return expression.name, _ATOM
    if isinstance(expression, Index):
        return f"{expression.param}[{_list(expression.indices)}]", _ATOM
    if isinstance(expression, Call):
        return f"{expression.function}({_list(expression.arguments)})", _ATOM
    if isinstance(expression, Unary):
        return _unary(expression)
    return _binary(expression)


def _constant(constant: Constant) -> tuple[str, int]:
    if constant.type == "bool":
        return str(constant.value).lower(), _ATOM
    text = _number(constant.value)
    return text, _LEVEL["-"] if " " in text else _NEGATION if text.startswith("-") else _ATOM


def _number(value: float) -> str:
    """A number; the lowest integer has no literal of its own."""
    return "-2147483647 - 1" if value == -(2**31) and isinstance(value, int) else repr(value)


def _list(expressions: tuple[Expression, ...]) -> str:
    return ", ".join(map(print_expression, expressions))


def _unary(unary: Unary) -> tuple[str, int]:
    if unary.operator == "not":
        return f"not {_inside(unary.operand, _LEVEL['not'])}", _LEVEL["not"]
    return f"-{_inside(unary.operand, _NEGATION)}", _NEGATION


def _binary(binary: Binary) -> tuple[str, int]:
    level = _LEVEL[binary.operator]
    chains = level == _LEVEL["<"]
    left = _inside(binary.left, level + 1 if chains else level)
    return f"{left} {binary.operator} {_inside(binary.right, level + 1)}", level


def _inside(expression: Expression, least: int) -> str:
    text, level = _expression(expression)
    return text if level >= least else f"({text})"
