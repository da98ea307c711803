"""A dispatch chooses one of several blocks, so they must look alike to a caller and differ in what it chooses by."""

from __future__ import annotations

from dsl import nodes
from dsl.check.draft import Draft
from dsl.check.resolve import Drafts
from dsl.diagnostics import quote
from dsl.spec import FAMILIES, Dispatch

_KEY = ("dtype", "kv_dtype", "heads", "kv_heads", "head_dim_qk", "head_dim_v", "block")
_ALIKE = {
    "the layout of q": ("q_layout",),
    "the layout of K": ("k_layout",),
    "the layout of V": ("v_layout", "shared_kv"),
    "the layout of out": ("out_layout",),
    "scales": ("kv_scale_axes",),
    "params": ("params",),
    "`lse`": ("lse",),
}


def dispatches(drafts: Drafts) -> list[Dispatch]:
    return [_dispatch(drafts, block) for block in drafts.file.blocks if isinstance(block, nodes.Dispatch)]


def _dispatch(drafts: Drafts, block: nodes.Dispatch) -> Dispatch:
    members: dict[str, tuple[nodes.Name, Draft]] = {}
    for item in block.blocks.items:
        if not isinstance(item, nodes.Name):
            drafts.error("ATTN213", item.span, "a dispatch lists names of attention blocks")
        elif item.text in members:
            related = [(members[item.text][0].span, "first named here")]
            drafts.error("ATTN213", item.span, f"block {quote(item.text)} is named twice", related=related)
        else:
            draft = drafts.attention(item, "block")
            if draft is not None:
                members[item.text] = (item, draft)
    if not block.blocks.items:
        drafts.error("ATTN213", block.blocks.span, "a dispatch lists at least one block")
    listed = list(members.values())
    alike = [member for member in listed if _alike(drafts, *member, *listed[0])]
    _differ(drafts, alike)
    spans = {"name": block.name.span, **{name: item.span for name, (item, _) in members.items()}}
    return Dispatch(block.name.text, tuple(members), spans)


def _alike(drafts: Drafts, name: nodes.Name, draft: Draft, first_name: nodes.Name, first: Draft) -> bool:
    """Whether the caller passes the same arguments, whichever block is chosen."""
    kinds, first_kinds = draft.get("query", "kv"), first.get("query", "kv")
    if kinds is None or first_kinds is None:
        return False
    differences = [
        what
        for what, fields in _ALIKE.items()
        if None not in (mine := draft.get(*fields), theirs := first.get(*fields)) and mine != theirs
    ]
    if FAMILIES[tuple(kinds)] != FAMILIES[tuple(first_kinds)]:
        differences = ["the kinds of query and kv"]
    if differences:
        message = f"{quote(name.text)} differs from {quote(first_name.text)} in {', '.join(differences)}"
        related = [(first_name.span, "the block that it differs from")]
        drafts.error("ATTN211", name.span, message, "the blocks of a dispatch are called alike", related)
    return not differences


def _differ(drafts: Drafts, listed: list[tuple[nodes.Name, Draft]]) -> None:
    """No two blocks answer the same call."""
    keys: dict[tuple, nodes.Name] = {}
    for name, draft in listed:
        key = draft.get(*_KEY)
        if key is None:
            continue
        other = keys.setdefault(tuple(key), name)
        if other is not name:
            message = f"{quote(name.text)} and {quote(other.text)} answer the same calls"
            advice = "the blocks of a dispatch differ in dtype, kv_dtype, heads, head_dim or block size"
            drafts.error("ATTN212", name.span, message, advice, [(other.span, "the other block")])
