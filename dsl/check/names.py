"""Which names a file may give: well formed, and none that Python, the language or the generated module needs.

The sets below are the one place that says what a generated module prints by itself.
"""

from __future__ import annotations

import builtins
import keyword

from dsl import nodes
from dsl.check.draft import Draft, Report
from dsl.diagnostics import quote
from dsl.expr.scope import ALIASES, BUILT_INS, CONSTANTS, FUNCTIONS
from dsl.spec import ARGUMENTS

LONGEST_NAME = 64

MODULE_NAMES = frozenset(
    {
        "torch",
        "triton",
        "tl",
        "libdevice",
        "annotations",
        "contextlib",
        "copy",
        "functools",
        "inspect",
        "math",
        "operator",
        "sys",
        "typing",
        "Any",
        "NamedTuple",
        "gluon",
        "gl",
        "fence_async_shared",
        "mbarrier",
        "mma_v2",
        "tma",
        "warpgroup_mma",
        "warpgroup_mma_wait",
        "TensorDescriptor",
        "name",
    }
)
"""Names that a generated module imports or defines, whatever its spec says, and that of an operator library; its
own begin with an underscore."""

BLOCK_SUFFIXES = ("_write",)
"""A module with a block `name` may define `name` + suffix."""

HELPER_ARGUMENTS = frozenset(
    {"block", "config", "tensors", "results", "scratch", "unit", "index", "programs", "device"}
)
"""Arguments that the helpers of a launcher take beside the tensors of the call."""

LAUNCHER_ARGUMENTS = frozenset(
    {argument for arguments in ARGUMENTS.values() for argument in arguments}
    | {"kv_lens", "k_scale", "v_scale", "out", "out_lse", "workspace", "check"}
)

_EXPRESSION_NAMES = frozenset(BUILT_INS) | frozenset(ALIASES) | frozenset(CONSTANTS) | frozenset(FUNCTIONS)
_BUILTINS = frozenset(dir(builtins))


def check_name(report: Report, name: nodes.Name, what: str) -> bool:
    """Whether a block, dispatch or param may be called that, but for names of its own file."""
    text = name.text
    flaw = _flaw(text)
    if flaw is not None:
        report.error("ATTN202", name.span, f"{quote(text)} is no name for {what}: {flaw}")
        return False
    if text in MODULE_NAMES or text in _BUILTINS:
        report.error("ATTN209", name.span, f"{quote(text)} is needed by the generated module", "choose another name")
        return False
    return True


def _flaw(text: str) -> str | None:
    if not text.isascii():
        return "it has a character outside ASCII"
    if text.startswith("_"):
        return "it starts with an underscore"
    if len(text) > LONGEST_NAME:
        return f"it is longer than {LONGEST_NAME} characters"
    if keyword.iskeyword(text):
        return "it is a keyword of Python"
    return None


def param_names(draft: Draft) -> None:
    for name, param in draft.params.items():
        if f"param {name}" in draft.inherited:
            continue
        if not check_name(draft, param.name, "a param"):
            continue
        if name in _EXPRESSION_NAMES:
            draft.error(
                "ATTN210", param.name.span, f"{quote(name)} has a meaning in expressions", "choose another name"
            )
        elif name in LAUNCHER_ARGUMENTS | HELPER_ARGUMENTS:
            draft.error(
                "ATTN210", param.name.span, f"{quote(name)} is an argument of the launcher", "choose another name"
            )


def derived_names(report: Report, names: dict[str, nodes.Name], blocks: set[str], params: list[nodes.Param]) -> None:
    """No block, dispatch or param is called what the module calls a helper of another block, or that block itself."""
    helpers = {block + suffix: block for block in blocks for suffix in BLOCK_SUFFIXES}
    for text, name in names.items():
        if text in helpers:
            _taken_by_module(report, name, helpers[text])
    for param in params:
        if param.name.text in helpers:
            _taken_by_module(report, param.name, helpers[param.name.text])
        elif param.name.text in names:
            related = [(names[param.name.text].span, "the block")]
            report.error("ATTN209", param.name.span, f"a block is called {quote(param.name.text)} too", related=related)


def _taken_by_module(report: Report, name: nodes.Name, block: str) -> None:
    message = f"the generated module uses {quote(name.text)} for a part of {quote(block)}"
    report.error("ATTN209", name.span, message, "choose another name")
