"""What a workload case costs at least, and how much of a GPU a launch fills: arithmetic, and nothing else.

Bytes and FLOPs follow from the spec and the lengths alone; head dimensions are the true ones, never padded. `explain`
prints these numbers and `bench` divides them by a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsl.plan.launch import DecodeLaunch
from dsl.plan.module import BlockPlan, Config, DecodeHopperPlan
from dsl.spec import ITEMSIZE, Case, Spec

INDEX_BYTES = 4
LSE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Cost:
    """The bytes that must move, each once, and the multiplications and additions of both dots."""

    bytes: int
    flops: int

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / max(self.bytes, 1)


def cost(spec: Spec, case: Case) -> Cost:
    """The cost of one batch. A mask is taken to hide nothing; params and scales are not counted."""
    lengths = list(zip(query_lengths(spec, case), case.kv_lens, strict=True))
    queries = sum(q_len for q_len, _ in lengths)
    keys = sum(kv_len for q_len, kv_len in lengths if q_len)
    pairs = sum(q_len * kv_len for q_len, kv_len in lengths)
    values_dim = 0 if spec.shared_kv else spec.head_dim_v
    cached = ITEMSIZE[spec.kv_dtype] * keys * spec.kv_heads * (spec.head_dim_qk + values_dim)
    rows = ITEMSIZE[spec.dtype] * queries * spec.heads * (spec.head_dim_qk + spec.head_dim_v)
    lse = LSE_BYTES * queries * spec.heads if spec.lse else 0
    return Cost(
        bytes=cached + rows + lse + INDEX_BYTES * _indices(spec, case),
        flops=2 * spec.heads * (spec.head_dim_qk + spec.head_dim_v) * pairs,
    )


def query_lengths(spec: Spec, case: Case) -> tuple[int, ...]:
    """The query tokens of each sequence; a decode has one, whatever the case says."""
    return (1,) * len(case.kv_lens) if spec.query == "single" else case.q_lens


def case_title(spec: Spec, case: Case) -> str:
    """A case in a few words: `32 seqs, kv_len 512..16384`."""
    seqs = len(case.kv_lens)
    shown = [f"{seqs} seq" if seqs == 1 else f"{seqs} seqs"]
    if spec.query != "single":
        shown.append(f"q_len {_span(case.q_lens)}")
    if spec.query == "single" or case.kv_lens != case.q_lens:
        shown.append(f"kv_len {_span(case.kv_lens)}")
    return ", ".join(shown)


def _span(lengths: tuple[int, ...]) -> str:
    shortest, longest = min(lengths), max(lengths)
    return str(longest) if shortest == longest else f"{shortest}..{longest}"


def _indices(spec: Spec, case: Case) -> int:
    """How many entries of index tensors are read: bounds of packed tokens, lengths, and pages of live keys."""
    seqs = len(case.kv_lens)
    bounds = (seqs + 1) * ((spec.query == "packed") + (spec.kv == "packed"))
    if spec.block is None:
        return bounds
    return bounds + seqs + sum(-(-kv_len // spec.block) for kv_len in case.kv_lens)


def table_width(spec: Spec, case: Case) -> int:
    """The pages that a row of the table holds where it is as wide as the longest sequence needs."""
    assert spec.block is not None
    return -(-max(case.kv_lens) // spec.block)


def auto_splits(
    programs: int,
    tiles: int,
    processors: int,
    *,
    programs_per_processor: int,
    tiles_per_split: int,
    maximum_splits: int,
) -> int:
    """Enough splits to fill the GPU with programs, as long as each has tiles to do."""
    wanted = programs_per_processor * processors // max(1, programs)
    least = 1 if programs < processors else tiles_per_split
    return max(1, min(wanted, tiles // least, maximum_splits))


@dataclass(frozen=True, slots=True)
class Share:
    """How programs share the keys of a decode on Hopper, as the generated launcher's record of that name says."""

    way: str
    programs: int
    parts: int
    stages: int
    kind: str
    merged: str


def num_splits(block: BlockPlan, config: Mapping[str, int], seqs: int, width: int, processors: int) -> int:
    """What the generated launcher computes for a table `width` pages wide."""
    launch, spec = block.launch, block.spec
    assert isinstance(launch, DecodeLaunch) and spec.block is not None
    most = block.expressions.most_keys
    if launch.bounded and most is not None:
        width = min(width, (most + config["TILE"]) // spec.block + 1)
    keys = width * spec.block
    if spec.split.kind == "none":
        return 1
    if spec.split.kind == "fixed":
        return max(1, -(-keys // int(block.constants["SPLIT_KEYS"])))
    return auto_splits(
        decode_programs(block, seqs),
        -(-keys // config["TILE"]),
        processors,
        programs_per_processor=launch.programs_per_processor,
        tiles_per_split=launch.tiles_per_split,
        maximum_splits=launch.maximum_splits,
    )


def decode_share(plan: DecodeHopperPlan, items: int, capacity: int, processors: int) -> Share:
    """What the generated launcher computes for the Hopper kernels: `items` are sequences times KV heads, of at most
    `capacity` keys."""
    work, constants = plan.work, plan.constants

    def share(way: str, programs: int, parts: int, merged: str = "") -> Share:
        on_processor = max(1.0, min(programs * (1 if way == "balanced" else parts) / processors, plan.resident))
        deep = (count for count in plan.stages if on_processor * count * plan.tile_bytes >= work.bytes_in_flight)
        return Share(way, programs, parts, next(deep, plan.stages[-1]), "", merged)

    fixed = int(constants.get("SPLIT_KEYS", 0 if "BALANCED" in plan.kernel.constants else -1))
    if 0 < fixed < capacity:
        return share("parts", items, -(-capacity // fixed), "fixed")
    if fixed != 0:
        return share("whole", items, 1)
    dims = int(constants["HEAD_DIM_QK"] + constants["HEAD_DIM_V"])
    if plan.registers and items * capacity * dims * 2 <= work.registers_bytes:
        keys = {kind: tokens * warps for kind, (tokens, warps) in plan.registers.shapes.items()}
        kind = "short" if capacity <= keys["short"] else "long"
        if items * -(-capacity // keys["few"]) <= work.few_programs * (1 if capacity <= keys["long"] else 2):
            kind = "few"
        parts = max(1, -(-capacity // keys[kind]))
        if parts == 1 or items * parts <= work.registers_programs * processors:
            return Share("registers", items, parts, 0, kind, "few" if parts <= 4 else "many")
    wanted = min(work.programs, plan.resident) * processors
    if items >= wanted and capacity <= work.whole_keys:
        return share("whole", items, 1)
    splits = max(1, min(wanted // items, work.splits, capacity // work.split_keys))
    programs = items * splits if items * splits <= plan.resident * processors else wanted
    return share("balanced", programs, 2, "few" if splits <= 4 else "many")


def decode_programs(block: BlockPlan, seqs: int) -> int:
    """Programs of one split: one for each sequence and each tile of query heads that share a KV head."""
    return seqs * block.spec.kv_heads * int(block.constants["HEAD_TILES"])


def paged_config(block: BlockPlan, config: Config, q_tokens: int, seqs: int) -> Config:
    """The tiles that the generated launcher chooses for packed queries over a paged cache: low ones for few tokens."""
    low = block.configs["low"]
    return low if q_tokens * block.spec.group <= seqs * low.constants["BLOCK_Q"] else config


def prefill_programs(config: Mapping[str, Any], q_tokens: int, seqs: int) -> int:
    """Slots for tiles of query rows: known from shapes alone, so a few of them may find nothing to do."""
    return -(-q_tokens // config["BLOCK_Q"]) + seqs + 1
