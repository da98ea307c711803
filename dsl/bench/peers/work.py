"""What a peer is given and what it answers: one set of a case's inputs, and a call that can be timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from dsl.plan import computed
from dsl.spec import Axis, Case, Family, Layout, Spec
from dsl.verify.inputs import Inputs
from dsl.verify.layouts import to_logical
from dsl.verify.oracle import QUERY_AXES

Attention = Callable[[], torch.Tensor]
"""One call of a peer on inputs that it was bound to. Its result ends in the axes head and dim, rows in our order."""

NHD: Layout = tuple(map(Axis, ("block", "slot", "kv_head", "dim")))
HND: Layout = tuple(map(Axis, ("block", "kv_head", "slot", "dim")))


class Absent(Exception):
    """A peer cannot be had here; says why in one line."""


class Refused(Exception):
    """A peer cannot take a case; says why in one line."""


class Peer(Protocol):
    """Another implementation. `origin` says where it comes from, with its version where it tells one."""

    name: str
    origin: str

    def bind(self, work: Work) -> Attention:
        """Plan and allocate for these inputs; what is not timed happens here. Raises Refused."""
        ...


@dataclass(frozen=True)
class Work:
    """One set of inputs of a case, by logical axes: views of the tensors that our own function reads."""

    spec: Spec
    case: Case
    inputs: Inputs

    @property
    def family(self) -> Family:
        return self.spec.family

    @property
    def query(self) -> torch.Tensor:
        """`[q_token, head, dim]`, or `[seq, head, dim]` of a decode."""
        return to_logical(self.inputs[self.spec.arguments[0]], self.spec.q_layout, QUERY_AXES[self.family])

    @property
    def keys(self) -> torch.Tensor:
        """Packed keys, `[kv_token, kv_head, dim]`."""
        return to_logical(self.inputs["k"], self.spec.k_layout, ("kv_token", "kv_head", "dim"))

    @property
    def values(self) -> torch.Tensor:
        """Packed values, `[kv_token, kv_head, dim]`."""
        return to_logical(self.inputs["v"], self.spec.v_layout, ("kv_token", "kv_head", "dim"))

    @property
    def scale(self) -> float:
        scale = self.spec.scale
        return self.inputs[scale] if isinstance(scale, str) else scale

    @property
    def seqs(self) -> int:
        return len(self.case.kv_lens)

    def pages(self, *layouts: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """Both caches as they lie, if that is one of these layouts. Raises Refused."""
        spec = self.spec
        if spec.k_layout != spec.v_layout or spec.k_layout not in layouts:
            raise Refused(f"reads caches as {' or '.join(map(shown, layouts))} only")
        return self.inputs["k_cache"], self.inputs["v_cache"]

    def padded(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Packed sequences of one length as `[seq, head, token, dim]`, without a copy. Raises Refused."""
        if len(set(self.case.q_lens)) > 1 or len(set(self.case.kv_lens)) > 1:
            raise Refused("takes sequences of one length only")
        tensors = (self.query, self.keys, self.values)
        return tuple(tensor.unflatten(0, (self.seqs, -1)).transpose(1, 2) for tensor in tensors)  # type: ignore[return-value]


def shown(layout: Layout) -> str:
    return f"[{', '.join(map(str, layout))}]"


def reason_against(spec: Spec) -> str | None:
    """Why no peer is asked about a block; None where they compute the same attention."""
    if spec.dtype not in ("bf16", "fp16"):
        return f"takes bf16 and fp16, not {spec.dtype}"
    if spec.kv_dtype != spec.dtype:
        return f"takes keys and values of the query's dtype, not {spec.kv_dtype}"
    if spec.shared_kv:
        return "takes values of their own, not the rows of the keys"
    if computed(spec).has_mask or spec.has_score or spec.sink is not None:
        return "computes plain attention, without this block's mask, score or sink"
    return None
