"""Axis lists: which tensor has which axes, in what order, and where one of them is split."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from dsl import nodes
from dsl.check.draft import Draft
from dsl.diagnostics import near, one_of, quote
from dsl.spec import FAMILIES, Axis, Layout

_PACKED_QUERY = ("q_token", "head", "dim")
_CACHE = ("block", "slot", "kv_head", "dim")
_PACKED_KV = ("kv_token", "kv_head", "dim")
_DENSE_QUERY = ("seq", "head", "q_token", "dim")
_DENSE_KV = ("seq", "kv_head", "kv_token", "dim")

DEFAULT_AXES: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "decode": {"q": ("seq", "head", "dim"), "k_cache": _CACHE, "v_cache": _CACHE, "out": ("seq", "head", "dim")},
        "prefill": {"q": _PACKED_QUERY, "k": _PACKED_KV, "v": _PACKED_KV, "out": _PACKED_QUERY},
        "paged": {"q": _PACKED_QUERY, "k_cache": _CACHE, "v_cache": _CACHE, "out": _PACKED_QUERY},
        "dense": {"q": _DENSE_QUERY, "k": _DENSE_KV, "v": _DENSE_KV, "out": _DENSE_QUERY},
    }
)
SPEC_FIELDS = {
    "q": "q_layout",
    "k": "k_layout",
    "v": "v_layout",
    "out": "out_layout",
    "k_cache": "k_layout",
    "v_cache": "v_layout",
}
_SPLITTABLE = ("dim", "slot")


def layouts(draft: Draft) -> None:
    """Every tensor's layout, written or default, and whether V lies inside K."""
    kinds = draft.get("query", "kv")
    if kinds is None:
        return
    tensors = DEFAULT_AXES[FAMILIES[kinds[0], kinds[1]]]
    for name, field in draft.fields.items():
        if name in SPEC_FIELDS and name not in tensors:
            message = f"a {kinds[0]} query over {kinds[1]} keys and values has no tensor {quote(name)}"
            draft.error("ATTN306", field.name.span, message, f"its tensors are {one_of(tuple(tensors))}")
    for tensor, axes in tensors.items():
        value = draft.value(tensor)
        if value is None:
            if draft.is_missing(tensor):
                draft.values[SPEC_FIELDS[tensor]] = tuple(Axis(axis) for axis in axes)
        elif isinstance(value, nodes.List):
            layout = _layout(draft, tensor, value, axes)
            if layout is not None:
                draft.values[SPEC_FIELDS[tensor]] = layout
        elif not (tensor == "v_cache" and isinstance(value, nodes.Name) and value.text == "k_cache"):
            advice = f"write `{tensor} = [{', '.join(axes)}]`"
            draft.error("ATTN301", value.span, f"{quote(tensor)} takes a list of axes", advice)
    _shared(draft)


def _shared(draft: Draft) -> None:
    """`v_cache = k_cache`: V is the first elements of K's rows."""
    value = draft.value("v_cache")
    draft.values["shared_kv"] = isinstance(value, nodes.Name) and value.text == "k_cache"
    if value is None or not draft.values["shared_kv"]:
        return
    if "k_layout" in draft.values:
        draft.values["v_layout"] = draft.values["k_layout"]
    dims = draft.get("head_dim_qk", "head_dim_v")
    if dims is not None and dims[1] > dims[0]:
        message = f"V's {dims[1]} elements do not fit into K's rows of {dims[0]}"
        draft.error("ATTN310", value.span, message, "`head_dim = DQK / DV` needs DV <= DQK here")


def _layout(draft: Draft, tensor: str, written: nodes.List, axes: tuple[str, ...]) -> Layout | None:
    """Read one axis list. Every finding is reported; the layout is returned if there was none."""
    before = len(draft.diagnostics)
    places: dict[Axis, nodes.Value] = {}
    for item in written.items:
        axis = _axis(draft, tensor, item, axes)
        if axis is None:
            continue
        clash = next((other for other in places if other.name == axis.name and _clash(other, axis)), None)
        if clash is not None:
            related = [(places[clash].span, "first named here")]
            draft.error("ATTN307", item.span, f"axis {quote(axis.name)} is named twice", related=related)
        else:
            places[axis] = item
    if len(draft.diagnostics) == before:
        _complete(draft, tensor, written, places, axes)
    if len(draft.diagnostics) == before:
        _splits(draft, tensor, places)
    if len(draft.diagnostics) == before:
        _contiguous(draft, written, tuple(places))
    return tuple(places) if len(draft.diagnostics) == before else None


def _clash(one: Axis, other: Axis) -> bool:
    return "whole" in (one.part, other.part) or one.part == other.part


def _axis(draft: Draft, tensor: str, item: nodes.Value, axes: tuple[str, ...]) -> Axis | None:
    name, factor = item, 1
    part: Literal["whole", "outer", "inner"] = "whole"
    if isinstance(item, nodes.Binary) and item.operator.text in "/%":
        part = "outer" if item.operator.text == "/" else "inner"
        name, number = item.left, item.right
        factor = number.value if isinstance(number, nodes.Number) and isinstance(number.value, int) else 0
        if factor < 2:
            draft.error("ATTN308", number.span, "an axis is split by a whole number from 2", "such as `dim/8`")
            return None
    if not isinstance(name, nodes.Name):
        draft.error("ATTN307", item.span, "this is no axis", f"{quote(tensor)} has the axes {', '.join(axes)}")
        return None
    if name.text not in axes:
        advice = near(name.text, axes) or f"its axes are {', '.join(axes)}"
        draft.error("ATTN307", name.span, f"{quote(tensor)} has no axis {quote(name.text)}", advice)
        return None
    if part != "whole" and (name.text not in _SPLITTABLE or "slot" not in axes):
        what = "only a cache may split an axis" if "slot" not in axes else "only `dim` and `slot` may be split"
        draft.error("ATTN308", item.span, what, f"write {quote(name.text)}")
        return None
    return Axis(name.text, part, factor)


def _complete(
    draft: Draft, tensor: str, written: nodes.List, places: dict[Axis, nodes.Value], axes: tuple[str, ...]
) -> None:
    """Every axis is there; a cache with one KV head may do without `kv_head`."""
    missing = [axis for axis in axes if all(named.name != axis for named in places)]
    if missing == ["kv_head"] and "slot" in axes:
        kv_heads = draft.values.get("kv_heads")
        if kv_heads in (None, 1):
            return
        message = f"{quote(tensor)} lacks the axis `kv_head`, but there are {kv_heads} KV heads"
        draft.error("ATTN307", written.span, message, "only a cache with one KV head may do without")
    elif missing:
        word = "axis" if len(missing) == 1 else "axes"
        names = ", ".join(quote(axis) for axis in missing)
        draft.error("ATTN307", written.span, f"{quote(tensor)} lacks the {word} {names}")


def _splits(draft: Draft, tensor: str, places: dict[Axis, nodes.Value]) -> None:
    for axis, item in places.items():
        other = next((other for other in places if other.name == axis.name and other is not axis), None)
        sign = {"outer": "%", "inner": "/"}.get(axis.part, "")
        if other is None:
            if axis.part != "whole":
                message = f"the other part of `{axis.name}` is not named"
                draft.error("ATTN308", item.span, message, f"name `{axis.name}{sign}{axis.factor}` too")
        elif axis.part == "inner" and other.factor != axis.factor:
            related = [(places[other].span, f"split by {other.factor} here")]
            message = f"the parts of `{axis.name}` are split by different numbers"
            draft.error("ATTN308", item.span, message, f"write `{axis.name}%{other.factor}`", related)
        elif axis.part == "inner":
            _divides(draft, tensor, axis, item)


def _divides(draft: Draft, tensor: str, axis: Axis, item: nodes.Value) -> None:
    size_of = {"slot": "block", "dim": "head_dim_v" if tensor == "v_cache" else "head_dim_qk"}[axis.name]
    size = draft.values.get(size_of)
    if size is not None and size % axis.factor:
        what = "block size" if axis.name == "slot" else "head size"
        draft.error("ATTN308", item.span, f"{axis.factor} does not divide the {what} of {size}")


def _contiguous(draft: Draft, written: nodes.List, layout: Layout) -> None:
    if layout[-1].part == "outer":
        message = f"the last axis is contiguous and cannot be `{layout[-1]}`"
        draft.error("ATTN309", written.items[-1].span, message, "end the list with an unsplit axis or an inner part")
