"""What the plan targets cannot run yet, refused at the field that asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsl.diagnostics import Diagnostic
from dsl.spec import Axis, Spec

TARGETS = ("portable", "hopper")
BASE = "portable"
"""The target that every block has: it runs wherever the others do not."""


def refusals(spec: Spec) -> Iterator[Diagnostic]:
    """Everything about a block that no plan target runs."""

    def refuse(code: str, field: str, message: str, help: str | None = None) -> Diagnostic:
        base = ((spec.inherited[field], "inherited from here"),) if field in spec.inherited else ()
        return Diagnostic(code, spec.spans[field], message, help, base)

    if spec.family == "dense":
        yield refuse("ATTN501", "kv", "no kernel runs batched queries yet", "use `query = packed` and `kv = packed`")
    if spec.kv_scale_axes is not None:
        yield refuse("ATTN506", "kv_dtype", "no kernel reads a quantised cache yet", f"use `kv_dtype = {spec.dtype}`")
    elif spec.kv_dtype != spec.dtype:
        yield refuse("ATTN506", "kv_dtype", "no kernel mixes two dtypes yet", f"use `kv_dtype = {spec.dtype}`")
    if spec.shared_kv:
        yield refuse("ATTN507", "v_cache", "no kernel reads values from the rows of k_cache yet")
    if spec.query == "packed" and spec.split.kind == "fixed":
        message = "the kernel of packed queries does not split keys"
        yield refuse("ATTN508", "split", message, "use `split = auto` or `split = none`")
    for field, layout in (("q", spec.q_layout), ("out", spec.out_layout)):
        if layout[-1] != Axis("dim"):
            yield refuse("ATTN509", field, f"no kernel reads {field} with a last axis other than dim yet")
    if spec.family == "prefill":
        for field, layout in (("k", spec.k_layout), ("v", spec.v_layout)):
            if layout[-1] != Axis("dim") or Axis("kv_head") not in layout:
                yield refuse("ATTN509", field, f"no kernel reads packed {field} in this layout yet")


def target_refusals(spec: Spec, targets: Sequence[str] | None) -> Iterator[Diagnostic]:
    """Targets of the spec, or of the caller, among which nothing runs what the others leave."""
    if spec.targets is not None and BASE not in spec.targets:
        yield Diagnostic(
            "ATTN511",
            spec.spans["targets"],
            f"no plan target {' or '.join(spec.targets)} runs this attention everywhere",
            f"write `targets = [{BASE}, {', '.join(spec.targets)}]`: {BASE} runs what the others leave",
        )
    elif targets is not None and BASE not in targets:
        message = f"this attention cannot be built for the target {' or '.join(targets)} alone"
        yield Diagnostic("ATTN511", spec.spans["targets"], message, f"add {BASE}, which runs what the others leave")
