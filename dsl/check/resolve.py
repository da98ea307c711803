"""Blocks by name, and what each inherits: from the file's syntax to one Draft a block."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dsl import nodes
from dsl.check.draft import Draft, Report
from dsl.check.fields import FIELDS
from dsl.check.names import check_name
from dsl.diagnostics import Diagnostic, near, quote
from dsl.source import Span

MOST_PARAMS = 64


@dataclass
class Drafts(Report):
    """All blocks of a file. `names` are the functions that the file defines, with the place of each name."""

    file: nodes.File = field(kw_only=True)
    drafts: list[Draft] = field(default_factory=list, kw_only=True)
    by_name: dict[str, Draft] = field(default_factory=dict, kw_only=True)
    names: dict[str, nodes.Name] = field(default_factory=dict, kw_only=True)

    def draft(self, name: str) -> Draft | None:
        return self.by_name.get(name)

    def add(self, draft: Draft) -> None:
        """The first of several blocks with one name is the one that the name means."""
        self.drafts.append(draft)
        if draft.name:
            self.by_name.setdefault(draft.name, draft)

    def attention(self, name: nodes.Name, what: str) -> Draft | None:
        """The attention block of that name; reports where there is none, unless its head failed to parse."""
        found = self.draft(name.text)
        if found is None and name.text not in self.file.broken:
            kind = "is no attention block" if name.text in self.names else "does not exist"
            self.error("ATTN207", name.span, f"{what} {quote(name.text)} {kind}", near(name.text, self.by_name))
        return found


def resolve(drafts: Drafts) -> None:
    """Give every attention block its own and its inherited fields and params."""
    file = drafts.file
    later = {block.name.text for block in file.blocks if isinstance(block, nodes.Attention) and block.name}
    for block in file.blocks:
        if isinstance(block, nodes.Workload):
            continue
        if block.name is not None:
            _claim(drafts, block.name, "a dispatch" if isinstance(block, nodes.Dispatch) else "a block")
        if isinstance(block, nodes.Attention):
            draft = _derived(drafts, block, later)
            drafts.add(draft)
            _take_own(draft, block)
    if not later and not file.diagnostics:
        drafts.error("ATTN201", Span(0, 0), "the file has no attention block")


def _claim(drafts: Drafts, name: nodes.Name, what: str) -> None:
    """One name, one function."""
    first = drafts.names.setdefault(name.text, name)
    if first is name:
        check_name(drafts, name, what)
    else:
        message = f"a second block is called {quote(name.text)}"
        drafts.error("ATTN206", name.span, message, related=[(first.span, "the first one")])


def _derived(drafts: Drafts, block: nodes.Attention, later: set[str]) -> Draft:
    """The block with what it inherits."""
    draft = Draft(block=block, unknown=block.broken, unknown_base=block.name is None)
    base = _base(drafts, block, block.base, later) if block.base else None
    draft.base = base
    if base is not None:
        draft.fields.update((name, item) for name, item in base.fields.items() if name in FIELDS)
        draft.params.update(base.params)
        draft.unknown |= base.unknown
        draft.unknown_base |= base.unknown_base
    elif block.base is not None:
        draft.unknown_base = True
    return draft


def _take_own(draft: Draft, block: nodes.Attention) -> None:
    """Give a draft what its block says itself."""
    own: dict[tuple[type, str], nodes.Field | nodes.Param] = {}
    for item in sorted((*block.fields, *block.params), key=lambda item: item.span):
        first = own.setdefault((type(item), item.name.text), item)
        if first is not item:
            what = "param" if isinstance(item, nodes.Param) else "field"
            message = f"{what} {quote(item.name.text)} is set twice"
            draft.error("ATTN204", item.name.span, message, related=[(first.name.span, "first set here")])
    _few_params(draft, own)
    draft.inherited = set(draft.fields) | {f"param {name}" for name in draft.params}
    for (_, name), item in own.items():
        if isinstance(item, nodes.Param):
            draft.params[name] = item
            draft.inherited.discard(f"param {name}")
        else:
            draft.fields[name] = item
            draft.inherited.discard(name)


def _few_params(draft: Draft, own: dict[tuple[type, str], nodes.Field | nodes.Param]) -> None:
    """Drop the params that a block has too many of, its base's included."""
    names = [*draft.params, *(name for kind, name in own if kind is nodes.Param and name not in draft.params)]
    if len(names) <= MOST_PARAMS:
        return
    excess = [own.pop((nodes.Param, name)) for name in names[MOST_PARAMS:]]
    message = f"a block has at most {MOST_PARAMS} params, its base's included"
    draft.error("ATTN215", excess[0].name.span, message, "pass a tensor param instead of many numbers")
    draft.unknown |= frozenset(names[MOST_PARAMS:])


def _base(drafts: Drafts, block: nodes.Attention, base: nodes.Name, later: set[str]) -> Draft | None:
    if drafts.draft(base.text) is None and base.text in later:
        own = block.name is not None and block.name.text == base.text
        message = "a block cannot be made from itself" if own else f"block {quote(base.text)} comes later in the file"
        drafts.error("ATTN208", base.span, message, None if own else "a base comes before what is made from it")
        return None
    return drafts.attention(base, "base block")


def relocate(drafts: Drafts) -> list[Diagnostic]:
    """What was found in the blocks. A finding in an inherited item moves to the block that inherits it and notes where
    the item stands; what the base has already been told is not said again.
    """
    told: set[tuple[str, Span]] = set()
    findings: list[Diagnostic] = []
    for draft in drafts.drafts:
        if not draft.diagnostics:
            continue
        items = {**draft.fields, **{f"param {name}": param for name, param in draft.params.items()}}
        places = [item.span for name, item in items.items() if name in draft.inherited]
        here = {(finding.code, finding.span) for finding in draft.diagnostics}
        for finding in draft.diagnostics:
            if not any(place.start <= finding.span.start and finding.span.end <= place.end for place in places):
                findings.append(finding)
            elif (finding.code, finding.span) not in told:
                related = ((finding.span, "inherited from here"), *finding.related)
                findings.append(replace(finding, span=draft.place, related=related))
        told |= here
    return findings
