"""The fields that hold an expression."""

from __future__ import annotations

import math

from dsl import nodes
from dsl.check.draft import Draft
from dsl.diagnostics import quote
from dsl.expr.tree import Constant, Expression, Name
from dsl.expr.types import param_type, type_expression

LARGEST_SCALE = 2.0**127
"""Scores are kept in float32, times log2(e)."""


def mask(draft: Draft) -> None:
    if draft.value("mask") is None:
        draft.values["mask"] = Constant(True, "bool")
        return
    found = _typed(draft, "mask")
    if found is None:
        return
    if found.type == "bool":
        draft.values["mask"] = found
    else:
        message = "a mask is a condition, not a number"
        draft.error("ATTN404", draft.fields["mask"].value.span, message, "such as `causal` or `q - kv < 128`")


def score(draft: Draft) -> None:
    if draft.value("score") is None:
        draft.values["score"] = Name("score", "float")
        return
    found = _number(draft, "score")
    if found is not None:
        draft.values["score"] = found


def sink(draft: Draft) -> None:
    if draft.value("sink") is None:
        draft.values["sink"] = None
        return
    found = _number(draft, "sink")
    if found is not None:
        draft.values["sink"] = found


def scale(draft: Draft) -> None:
    """A number, or the name of a param that is one."""
    value = draft.value("scale")
    if value is None:
        if "head_dim_qk" in draft.values:
            draft.values["scale"] = 1 / math.sqrt(draft.values["head_dim_qk"])
        return
    param = next((param for param in draft.values["params"] if _is_name(value, param.name)), None)
    if param is not None and param.axes is None and param_type(param) != "bool":
        draft.values["scale"] = param.name
        return
    if param is not None:
        message = f"{quote(param.name)} is {'a tensor' if param.axes else 'a condition'}"
        draft.error("ATTN404", value.span, message, "a scale is a constant or a param that is a number")
        return
    found = _number(draft, "scale")
    if isinstance(found, Constant) and abs(float(found.value)) > LARGEST_SCALE:
        draft.error("ATTN404", value.span, "the scale is larger than what float32 holds", f"at most {LARGEST_SCALE:g}")
    elif isinstance(found, Constant):
        draft.values["scale"] = float(found.value)
    elif found is not None:
        message = "a scale is a constant or the name of a param, not an expression of params"
        draft.error("ATTN404", value.span, message, "let the caller pass the product")


def _is_name(value: nodes.Value, text: str) -> bool:
    return isinstance(value, nodes.Name) and value.text == text


def _number(draft: Draft, field: str) -> Expression | None:
    """The typed value of a field that holds a number; a constant becomes a float."""
    found = _typed(draft, field)
    if found is None:
        return None
    if found.type == "bool":
        advice = "a condition becomes a number by `where(condition, 1, 0)`"
        draft.error("ATTN404", draft.fields[field].value.span, f"`{field}` is a number, not a condition", advice)
        return None
    return Constant(float(found.value), "float", found.span) if isinstance(found, Constant) else found


def _typed(draft: Draft, field: str) -> Expression | None:
    base = draft.base
    if base is not None and field in base.typed and _sees_the_same(draft, base, field):
        draft.typed[field] = base.typed[field]
    else:
        params = {param.name: param for param in draft.values["params"]}
        draft.typed[field] = type_expression(draft.fields[field].value, field, params, draft.unknown, draft.error)
    return draft.typed[field]


def _sees_the_same(draft: Draft, base: Draft, field: str) -> bool:
    """Whether a field is its base's, and so are the names that it may use."""
    same_names = base.values["params"] == draft.values["params"] and base.unknown == draft.unknown
    return same_names and base.fields[field] is draft.fields[field]
