"""What a block's expressions add beside the kernel's own text: the reference in PyTorch, and bounds of tiles."""

from __future__ import annotations

from dataclasses import dataclass

from dsl.expr.to_torch import torch_function, torch_outside
from dsl.expr.tree import Type
from dsl.expr.types import param_type
from dsl.expr.visible import most_keys
from dsl.plan.module import Argument, ExpressionPlan, KernelPlan, ReferenceFunction
from dsl.plan.shaping import Shaping, Surroundings, has_expressions, place_of
from dsl.source import Source
from dsl.spec import Spec


@dataclass(frozen=True, slots=True)
class BoundsKernel(KernelPlan):
    """The kernel that finds the least and the greatest element of a param in each tile of keys."""


def bounds_kernel(name: str) -> BoundsKernel:
    arguments = (
        Argument("elements", "pointer", "int32"),
        Argument("bounds", "pointer", "int32", varies=False),
        *(Argument(integer, "integer", "int32") for integer in ("stride", "extent", "tokens", "blocks")),
        Argument("BLOCK", "constant", ""),
    )
    return BoundsKernel(name=name, template="kernels/bounds.py.jinja", arguments=arguments)


def expressions(spec: Spec, source: Source, shaping: Shaping, around: Surroundings) -> ExpressionPlan:
    """The functions of the reference, and what is known of the mask."""
    if not has_expressions(spec):
        return ExpressionPlan()
    numbers: dict[str, Type] = {param.name: param_type(param) for param in spec.params if param.axes is None}
    wanted = {"mask": (spec.mask, "bool"), "score": (spec.score, "float"), "sink": (spec.sink, "float")}
    written = {"mask": spec.has_mask, "score": spec.has_score, "sink": spec.sink is not None}
    functions = []
    for field, (expression, kind) in wanted.items():
        if written[field]:
            assert expression is not None
            body = torch_function(expression, spec.heads, numbers, kind)
            place = place_of(spec, source, field)
            functions.append(ReferenceFunction(field, f"_{spec.name}_{field}", place, body.lines, body.result))
    parts = tuple(part for part in (spec.mask, spec.score, spec.sink) if part is not None)
    axes = {param.name: param.axes for param in spec.params if param.axes is not None}
    outside = torch_outside(parts, spec.heads, numbers, axes)
    if outside is not None:
        name = f"_{spec.name}_outside"
        title = "Where a branch that is taken reads a param outside of it."
        functions.append(ReferenceFunction("outside", name, title, outside.lines, outside.result))
    bounds = bounds_kernel("_bounds_kernel") if shaping.scan else None
    return ExpressionPlan(tuple(functions), bounds, most_keys(shaping.alternatives, around.ranges))
