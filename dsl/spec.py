"""What one `.attn` file means, once it has been checked: plain, frozen facts about the attention, no decision.

`check` makes these; `plan`, the oracle and `explain` read them. Nothing here knows about tiles, GPUs or Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from dsl.expr.tree import Constant, Expression, Name
from dsl.source import Source, Span

QueryKind = Literal["single", "packed", "batched"]
KvKind = Literal["packed", "paged", "batched"]
Family = Literal["decode", "prefill", "paged", "dense"]

FAMILIES: Mapping[tuple[str, str], Family] = MappingProxyType(
    {
        ("single", "paged"): "decode",
        ("packed", "packed"): "prefill",
        ("packed", "paged"): "paged",
        ("batched", "batched"): "dense",
    }
)

ARGUMENTS: Mapping[Family, tuple[str, ...]] = MappingProxyType(
    {
        "decode": ("query", "k_cache", "v_cache", "block_tables", "seq_lens"),
        "prefill": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
        "paged": ("q", "k_cache", "v_cache", "cu_seqlens_q", "block_tables", "seq_lens"),
        "dense": ("q", "k", "v"),
    }
)

ITEMSIZE: Mapping[str, int] = MappingProxyType(
    {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 1, "fp8_e4m3fnuz": 1, "fp8_e5m2": 1, "int8": 1}
)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a tensor: whole (`dim`), the outer part (`dim/8`) or the inner part (`dim%8`) of a split axis."""

    name: str
    part: Literal["whole", "outer", "inner"] = "whole"
    factor: int = 1

    def __str__(self) -> str:
        return {"whole": self.name, "outer": f"{self.name}/{self.factor}", "inner": f"{self.name}%{self.factor}"}[
            self.part
        ]


Layout = tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class Param:
    """A tensor (`axes` not None) or a number that the caller passes. An axis is a name or an extent."""

    name: str
    dtype: str
    axes: tuple[str | int, ...] | None


@dataclass(frozen=True, slots=True)
class Split:
    """How a sequence's keys may be cut into parts: `auto`, `none`, or `fixed` parts of `keys` keys."""

    kind: Literal["auto", "none", "fixed"] = "auto"
    keys: int | None = None


@dataclass(frozen=True, slots=True)
class Spec:
    """One `attention` block with every default filled in.

    `spans` maps a field's name (`head_dim`, `mask`, ...; `name` for the block's name) to where it was written; a
    defaulted field maps to the block's name, an inherited one to the derived block's name; `inherited` maps the latter
    to where the base wrote it. Equality ignores both.
    `mask`, `score` and `sink` are typed trees; the trivial ones are `Constant(True)`, `Name("score")` and None.
    `scale` is a number or the name of a scalar param.
    `kv_scale_axes` is None where the cache is not quantised, () for per-tensor scales.
    """

    name: str
    query: QueryKind
    query_max: int | None
    kv: KvKind
    block: int | None
    dtype: str
    kv_dtype: str
    kv_scale_axes: tuple[str, ...] | None
    heads: int
    kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    q_layout: Layout
    k_layout: Layout
    v_layout: Layout
    out_layout: Layout
    shared_kv: bool
    params: tuple[Param, ...]
    mask: Expression
    score: Expression
    sink: Expression | None
    scale: float | str
    lse: bool
    split: Split
    softmax: Literal["auto", "online"]
    targets: tuple[str, ...] | None
    spans: Mapping[str, Span] = field(compare=False, hash=False, repr=False, default_factory=dict)
    inherited: Mapping[str, Span] = field(compare=False, hash=False, repr=False, default_factory=dict)

    @property
    def family(self) -> Family:
        return FAMILIES[self.query, self.kv]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The launcher's positional arguments; a shared cache has no v argument."""
        names = ARGUMENTS[self.family]
        return tuple(name for name in names if not (self.shared_kv and name == "v_cache"))

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def has_mask(self) -> bool:
        return not (isinstance(self.mask, Constant) and self.mask.value is True)

    @property
    def has_score(self) -> bool:
        return not (isinstance(self.score, Name) and self.score.name == "score")


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One function over several blocks of a family, chosen by dtype, heads, dims and block size."""

    name: str
    blocks: tuple[str, ...]
    spans: Mapping[str, Span] = field(compare=False, hash=False, repr=False, default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """Lengths of one workload case, one entry a sequence."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Shapes for verify, bench, tune and explain; never a fact about the kernel."""

    block: str
    cases: tuple[Case, ...]
    spans: Mapping[str, Span] = field(compare=False, hash=False, repr=False, default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpecFile:
    """Everything that one file says, in the file's order."""

    source: Source
    attentions: tuple[Spec, ...]
    dispatches: tuple[Dispatch, ...]
    workloads: tuple[Workload, ...]

    def attention(self, name: str) -> Spec:
        """The block of that name. Raises KeyError."""
        for spec in self.attentions:
            if spec.name == name:
                return spec
        raise KeyError(name)
