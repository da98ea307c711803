"""From the syntax tree to what it means: every rule of the language that the grammar cannot say.

A rule reads a draft's items, puts the values that it makes of them into the draft, and reports what is wrong. Rules
run in the order of the tuple and go on after an error, so that one run tells everything.
"""

from __future__ import annotations

from types import MappingProxyType

from dsl import nodes
from dsl.check import expressions, fields
from dsl.check.dispatch import dispatches
from dsl.check.draft import Draft, TooManyFindings
from dsl.check.layouts import layouts
from dsl.check.names import derived_names, param_names
from dsl.check.params import params
from dsl.check.resolve import Drafts, relocate, resolve
from dsl.check.workload import workloads
from dsl.diagnostics import MOST_FINDINGS, SpecError, too_many
from dsl.source import Source, Span
from dsl.spec import Spec, SpecFile
from dsl.syntax import parse

RULES = (
    fields.known_fields,
    fields.required_fields,
    fields.query,
    fields.kv,
    fields.family,
    fields.dtype,
    fields.kv_dtype,
    fields.heads,
    fields.head_dim,
    layouts,
    param_names,
    params,
    expressions.mask,
    expressions.score,
    expressions.sink,
    expressions.scale,
    fields.lse,
    fields.split,
    fields.softmax,
    fields.targets,
)


def load_spec(source: Source) -> SpecFile:
    """Parse and check a spec. Raises SpecError."""
    return check(parse(source))


def check(file: nodes.File) -> SpecFile:
    """Say what a file means. Raises SpecError with everything that is wrong with it, in the order of the text."""
    drafts = Drafts(file=file)
    spec_file, cut_off = None, False
    try:
        spec_file = _checked(drafts)
    except TooManyFindings:
        cut_off = True
    findings = [*file.diagnostics, *drafts.diagnostics, *relocate(drafts)]
    if cut_off and len(findings) <= MOST_FINDINGS:
        findings.append(too_many(max(finding.span for finding in findings)))
    if findings or spec_file is None:
        raise SpecError(file.source, findings)
    return spec_file


def _checked(drafts: Drafts) -> SpecFile | None:
    """What the file means, None where something is wrong with it. Raises TooManyFindings."""
    resolve(drafts)
    places: set[tuple[str, Span]] = set()
    said = 0
    for draft in drafts.drafts:
        for rule in RULES:
            rule(draft)
        places |= {(finding.code, finding.span) for finding in draft.diagnostics}
        said += len(draft.diagnostics)
        # A block made from a wrong one says the same again, which is told once.
        if len(places) > MOST_FINDINGS or said > 10 * MOST_FINDINGS:
            raise TooManyFindings
    found_dispatches = dispatches(drafts)
    found_workloads = workloads(drafts)
    _names_of_file(drafts)
    if drafts.file.diagnostics or drafts.diagnostics or any(draft.diagnostics for draft in drafts.drafts):
        return None
    specs = tuple(_spec(draft) for draft in drafts.drafts)
    return SpecFile(drafts.file.source, specs, tuple(found_dispatches), tuple(found_workloads))


def _names_of_file(drafts: Drafts) -> None:
    blocks = {draft.name for draft in drafts.drafts if draft.name}
    params_of_file = [param for draft in drafts.drafts for param in draft.block.params]
    derived_names(drafts, drafts.names, blocks, params_of_file)


def _spec(draft: Draft) -> Spec:
    written = {name: field.value.span for name, field in draft.fields.items()}
    written.update({f"param {name}": param.span for name, param in draft.params.items()})
    inherited = {name: place for name, place in written.items() if name in draft.inherited}
    # The block's name stands for what was inherited or left out.
    spans = {**dict.fromkeys(("name", *fields.FIELDS), draft.place), **written, **dict.fromkeys(inherited, draft.place)}
    return Spec(name=draft.name, spans=MappingProxyType(spans), inherited=MappingProxyType(inherited), **draft.values)
