"""The kernel that merges the splits of each row of a decode."""

from __future__ import annotations

from dataclasses import dataclass

from dsl.plan.module import Argument, KernelPlan, MergePlan
from dsl.plan.tiles import next_power_of_two
from dsl.spec import Spec

TEMPLATE = "kernels/merge.py.jinja"
SPLIT_TILE = 16


@dataclass(frozen=True, slots=True)
class MergeKernel(KernelPlan):
    lse: bool


def merge(spec: Spec, name: str) -> MergePlan:
    """The merge of a block's splits. `split_out` is `[seq, head, split, dim]`, `split_lse` `[seq, head, split]`."""
    padded = next_power_of_two(spec.head_dim_v)
    constants = {"HEADS": spec.heads, "HEAD_DIM": spec.head_dim_v, "DIM_PADDED": padded, "SPLIT_TILE": SPLIT_TILE}
    integers = ("num_splits", "stride_out_seq", "stride_out_head")
    integers += ("stride_lse_seq", "stride_lse_head") if spec.lse else ()
    arguments = (
        *(Argument(tensor, "pointer", "fp32", varies=False) for tensor in ("split_out", "split_lse")),
        Argument("out", "pointer", "data"),
        *((Argument("out_lse", "pointer", "fp32"),) if spec.lse else ()),
        *(Argument(integer, "integer", "int32") for integer in integers),
        *(Argument(constant, "constant", "") for constant in constants),
    )
    kernel = MergeKernel(name=name, template=TEMPLATE, arguments=arguments, lse=spec.lse)
    return MergePlan(kernel, constants, num_warps=4 if padded <= 256 else 8)
