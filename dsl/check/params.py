"""Params: tensors and numbers that the caller passes."""

from __future__ import annotations

from dsl import nodes
from dsl.check.draft import Draft
from dsl.diagnostics import near, one_of, quote
from dsl.spec import Param

PARAM_DTYPES = ("int32", "int64", "bool", "bf16", "fp16", "fp32")
PARAM_AXES = ("head", "kv_head", "seq", "q_token", "kv_token")


def params(draft: Draft) -> None:
    """All params, typed. One that is wrong is left out and its name becomes unknown."""
    found, wrong = [], set()
    base = {param.name: param for param in draft.base.values["params"]} if draft.base else {}
    for name, written in draft.params.items():
        param = base.get(name) if f"param {name}" in draft.inherited else _param(draft, written)
        if param is None:
            wrong.add(name)
        else:
            found.append(param)
    draft.unknown |= wrong
    draft.values["params"] = tuple(found)


def _param(draft: Draft, written: nodes.Param) -> Param | None:
    before = len(draft.diagnostics)
    dtype = written.dtype
    if dtype.text not in PARAM_DTYPES:
        advice = near(dtype.text, PARAM_DTYPES) or f"the types are {one_of(PARAM_DTYPES)}"
        draft.error("ATTN313", dtype.span, f"a param cannot be {quote(dtype.text)}", advice)
    axes = None if written.axes is None else _axes(draft, written.name.text, written.axes)
    return Param(written.name.text, dtype.text, axes) if len(draft.diagnostics) == before else None


def _axes(draft: Draft, name: str, written: nodes.List) -> tuple[str | int, ...]:
    if not written.items:
        advice = f"a number has no brackets: `param {name} : ...`"
        draft.error("ATTN313", written.span, "a tensor has at least one axis", advice)
    axes = [_axis(draft, axis) for axis in written.items]
    return tuple(axis for axis in axes if axis is not None)


def _axis(draft: Draft, axis: nodes.Value) -> str | int | None:
    if isinstance(axis, nodes.Name) and axis.text in PARAM_AXES:
        return axis.text
    if isinstance(axis, nodes.Number) and isinstance(axis.value, int) and axis.value > 0:
        return axis.value
    advice = near(axis.text, PARAM_AXES) if isinstance(axis, nodes.Name) else None
    listing = f"the axes are {', '.join(PARAM_AXES)} and whole numbers from 1"
    what = f"a param has no axis {quote(axis.text)}" if isinstance(axis, nodes.Name) else "this is no axis of a param"
    draft.error("ATTN313", axis.span, what, advice or listing)
    return None
