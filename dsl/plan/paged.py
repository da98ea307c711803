"""The portable kernel for `packed x paged`: what its template prints and the tiles it runs with.

Rows of a tile are pairs of a query token and a query head of the group that shares a KV head, so that a few tokens of a
decode fill a tile with their heads, and a long chunk is cut into tiles of tokens, by one and the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsl.architecture import ARCHITECTURES, UNLISTED, Architecture
from dsl.expr.intervals import Interval
from dsl.expr.statements import KEYS, ROWS, Computed, Value
from dsl.expr.to_triton import BOTH
from dsl.layout import CacheAccess, DimPiece, contiguous_slots, paged_cache
from dsl.plan.decode import MOST_KEYS, KeyDot
from dsl.plan.module import Argument, Config, KernelPlan
from dsl.plan.shaping import (
    PLAIN,
    Shaping,
    StepLines,
    Surroundings,
    bounds_tell,
    has_expressions,
    pair_bytes,
    scales,
    shape,
)
from dsl.plan.tiles import LOG2_E, head_dim_pieces
from dsl.plan.tuned import tuned
from dsl.source import Source
from dsl.spec import ITEMSIZE, Axis, Spec

TEMPLATE = "kernels/paged.py.jinja"
SEARCH = 32
MOST_WARPS = 8
MOST_ROWS = 2**30
"""Query tokens times heads of a group of one launch, which the launcher checks."""
OUTER_STRIDES = tuple(f"stride_{tensor}_{axis}" for tensor in ("q", "out") for axis in ("token", "head"))
LOW_ROWS = 32
"""Rows of the tiles that batches of few tokens take: too few for a wgmma."""
NARROW = 64
"""The pieces of a head dimension below which ptxas gets descriptors of wgmma operands wrong, outside of a pipeline."""
READS_OPERANDS_FROM_SHARED_MEMORY = ("sm90", "sm100")
HAS_WGMMA = ("sm90", UNLISTED.name)
_ROW, _KEY = frozenset((ROWS,)), frozenset((KEYS,))


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the loop over tiles of keys: over those that all rows see whole, or over others, with tests."""

    partial: bool
    k: CacheAccess
    v: CacheAccess
    lines: StepLines
    visible: str

    @property
    def caches(self) -> tuple[CacheAccess, CacheAccess]:
        return self.k, self.v

    @property
    def chunked(self) -> bool:
        """Some cache is read in chunks of slots."""
        return self.k.chunked or self.v.chunked

    @property
    def indices(self) -> tuple[str, ...]:
        """The positions by which pages are looked up: of each token, of each chunk of slots, or both."""
        used = {"chunk" if cache.chunked else "token" for cache in self.caches}
        return tuple(name for name in ("token", "chunk") if name in used)

    @property
    def places_tokens(self) -> bool:
        """Whether the position of each token is read."""
        lines = (*self.lines.tests, *self.lines.score)
        return self.partial or "token" in self.indices or any("token_position" in line for line in lines)

    @property
    def key_dots(self) -> tuple[KeyDot, ...]:
        return tuple(KeyDot(tile, ", scores" if number else "") for number, tile in enumerate(self.k.tiles))


@dataclass(frozen=True, slots=True)
class PagedKernel(KernelPlan):
    qk_pieces: tuple[DimPiece, ...]
    v_pieces: tuple[DimPiece, ...]
    lse: bool
    precision: str
    whole: Step
    partial: Step
    shaping: Shaping = PLAIN

    @property
    def caches(self) -> tuple[CacheAccess, CacheAccess]:
        return self.partial.caches

    @property
    def visits_ranges(self) -> bool:
        """Whether the loop is over the tiles that some row sees."""
        return self.shaping.shaped

    @property
    def two_ranges(self) -> bool:
        return self.shaping.two_ranges

    @property
    def functions(self) -> frozenset[str]:
        """The functions that expressions call."""
        return self.shaping.functions

    @property
    def signs_query(self) -> bool:
        """Whether Q takes the sign of a scale that is not positive: maxima are taken before the scale."""
        return "SIGN" in self.constants

    @property
    def positions(self) -> tuple[tuple[str, str, str], ...]:
        tokens = (("token_offsets", "tl.arange(0, TILE)", "[TILE]"),)
        chunks = (
            ("chunk_offsets", "tl.arange(0, TILE // CHUNK) * CHUNK", "[TILE // CHUNK]"),
            ("in_chunk", "tl.arange(0, CHUNK)", "[CHUNK]"),
        )
        return tokens + (chunks if self.partial.chunked else ())

    @property
    def wide_strides(self) -> tuple[str, ...]:
        """Strides between tokens of the query, heads and pages, which always count in 64 bits."""
        return tuple(name for name in _aligned(*self.caches) if name not in self.page_strides)

    @property
    def page_strides(self) -> tuple[str, ...]:
        """Strides within a page, which count in 64 bits only where a page is that large."""
        return tuple(name for cache in self.caches for name in cache.page_strides)


def _aligned(k: CacheAccess, v: CacheAccess) -> tuple[str, ...]:
    return (*OUTER_STRIDES, *(name for name, _ in k.strides), *(name for name, _ in v.strides))


def surroundings(spec: Spec) -> Surroundings:
    """What the kernel has in scope for expressions: rows are query tokens, each with the heads of one group."""
    position = Value("token_position", "int32", _KEY)
    names = {
        "q": Computed("q_position", "kv_len - q_len + held_row // GROUP", "int32", _ROW),
        "kv": position,
        "h": Computed("head_index", "kv_head * GROUP + held_row % GROUP", "int32", _ROW),
        "kv_head": Value("kv_head", "int32"),
        "b": Value("segment", "int32"),
        "q_token": Computed("q_token", "start + held_row // GROUP", "int32", _ROW),
        "kv_token": position,
        "kv_start": Value("0", "int32", constant=0),
        "q_len": Value("q_len", "int32"),
        "kv_len": Value("kv_len", "int32"),
        "score": Value("score", "float", BOTH),
    }
    ranges = {
        "q": Interval(-MOST_ROWS, MOST_KEYS - 1),
        **dict.fromkeys(("kv", "kv_token"), Interval(0, MOST_KEYS - 1)),
        "q_token": Interval(0, MOST_ROWS - 1),
        "b": Interval(0, 2**31 - 1),
        "kv_start": Interval(0, 0),
        "q_len": Interval(0, MOST_ROWS),
        "kv_len": Interval(0, MOST_KEYS),
        "h": Interval(0, spec.heads - 1),
        "kv_head": Interval(0, spec.kv_heads - 1),
    }
    return Surroundings(names, ranges, "BLOCK_Q", "TILE", "token_live", "token_seen", "kv_len", "owned")


def _step(spec: Spec, partial: bool, qk: tuple[DimPiece, ...], v: tuple[DimPiece, ...], shaping: Shaping) -> Step:
    seen = "token_seen" if shaping.masked else "token_live"
    lines = shaping.partial if partial else shaping.full
    return Step(
        partial,
        paged_cache("k_cache", "k", spec.k_layout, qk, "token_live" if partial else None),
        paged_cache("v_cache", "v", spec.v_layout, v, seen if partial else None),
        lines,
        lines.visible or "token_live[None, :]",
    )


def kernel(spec: Spec, name: str, source: Source) -> tuple[PagedKernel, dict[str, float]]:
    """The kernel text of a block and the constants of the block that it is launched with."""
    qk, v, dims = head_dim_pieces(spec.head_dim_qk, spec.head_dim_v)
    shaping = shape(spec, source, surroundings(spec))
    whole, partial = (_step(spec, partial, qk, v, shaping) for partial in (False, True))
    assert spec.block is not None
    constants = {**scales(spec, shaping), "GROUP": spec.group, **dims, "BLOCK": spec.block, "SEARCH": SEARCH}
    if isinstance(spec.scale, float) and spec.scale <= 0 and not shaping.scored:
        constants |= {"SCALE_LOG2": abs(spec.scale or 1.0) * LOG2_E, "SIGN": -1.0 if spec.scale else 0.0}
    integers = (
        *("num_seqs", "q_tokens", "search_step", "table_width"),
        *("stride_cu_q", "stride_table_seq", "stride_table_page", "stride_seq_lens"),
        *_aligned(*partial.caches),
        *(("stride_lse_head", "stride_lse_token") if spec.lse else ()),
    )
    tile_constants = ("BLOCK_Q", "TILE", *(("CHUNK",) if partial.chunked else ()), "ALIGNMENT", "INDEX")
    arguments = (
        Argument("q", "pointer", "data"),
        *(Argument(tensor, "pointer", "cache") for tensor in ("k_cache", "v_cache")),
        *(Argument(tensor, "pointer", "index") for tensor in ("cu_seqlens_q", "block_tables", "seq_lens")),
        Argument("out", "pointer", "data"),
        *((Argument("out_lse", "pointer", "fp32"),) if spec.lse else ()),
        *(Argument(integer, "integer", "int32") for integer in integers),
        *shaping.arguments,
        *(Argument(constant, "constant", "") for constant in (*constants, *tile_constants)),
    )
    plan = PagedKernel(
        name=name,
        template=TEMPLATE,
        arguments=arguments,
        qk_pieces=qk,
        v_pieces=v,
        lse=spec.lse,
        precision=', input_precision="ieee"' if spec.dtype == "fp32" else "",
        whole=whole,
        partial=partial,
        shaping=shaping,
    )
    return plan, constants


def tiles(spec: Spec, block_q: int, tile: int) -> dict[str, int]:
    """The constants of a configuration."""
    assert spec.block is not None
    layouts = [layout for layout in (spec.k_layout, spec.v_layout) if layout[-1].name == "slot"]
    runs = [contiguous_slots(layout, spec.block) for layout in layouts]
    # At least two chunks a tile, or Triton loads their slots one by one.
    return {"BLOCK_Q": block_q, "TILE": tile, **({"CHUNK": min(tile // 2, *runs)} if runs else {})}


def shared_bytes(spec: Spec, constants: Mapping[str, int], num_stages: int, architecture: Architecture) -> int:
    """An upper bound on the shared memory of one block.

    AMD's compiler keeps one operand at a time there. NVIDIA's keeps Q, P, and the stages of K, V and params read by
    pair; the sums take their place on their way to another layout.
    """
    size = ITEMSIZE[spec.dtype]
    rows, columns = constants["BLOCK_Q"], constants["TILE"]
    qk, v, _ = head_dim_pieces(spec.head_dim_qk, spec.head_dim_v)
    qk_dim, v_dim = sum(piece.extent for piece in qk), sum(piece.extent for piece in v)
    reductions = 4096 + (4 * MOST_WARPS * columns if has_expressions(spec) else 0)
    if architecture.is_amd:
        return size * (max(rows, num_stages * columns) * max(qk_dim, v_dim) + rows * columns) + reductions
    tables = rows * columns * pair_bytes(spec, surroundings(spec)) * max(num_stages - 1, 1)
    operands = size * (rows * (qk_dim + columns) + num_stages * columns * (qk_dim + v_dim)) + tables
    return max(operands, 4 * rows * max(qk_dim, v_dim)) + reductions


def configs(spec: Spec, architecture: Architecture) -> tuple[Config, ...]:
    """Candidates for one architecture, best first; of low tiles where `packed(max = N)` promises few tokens."""
    stages = 1 if architecture.is_amd else 2
    dim = max(spec.head_dim_qk, spec.head_dim_v)
    low = [(32, 64, 4), (32, 32, 4), (16, 32, 4), (16, 16, 4)]
    few_registers = dim > 64 and _multiplies_in_registers(architecture)
    if spec.dtype == "fp32" or dim > 128 or (few_registers and _reshapes(spec)):
        shapes = [(64, 32, 8), *low[1:]]
    elif few_registers or (dim > 64 and _reduces(spec)):
        shapes = [(128, 32, 8), (64, 32, 4), *low[1:]]
    else:
        shapes = [(128, 64, 8), (64, 64, 4), (64, 32, 4), *low]
    if _takes_low_tiles(spec, architecture):
        shapes = [shape for shape in shapes if shape[0] <= LOW_ROWS]
    launches = [(tiles(spec, rows, keys), warps, stages) for rows, keys, warps in shapes]
    # What was measured without a score leaves no registers for one.
    measured = None if spec.has_score else tuned(spec, architecture.name)
    if measured is not None:
        constants = {name: measured[name] for name in launches[0][0]}
        launches.insert(0, (constants, measured["num_warps"], measured["num_stages"]))
    return tuple(
        Config(constants, warps, stages, shared_bytes(spec, constants, stages, architecture))
        for constants, warps, stages in launches
    )


def _multiplies_in_registers(architecture: Architecture) -> bool:
    """Whether operands and sums of products both lie in registers, which leaves fewer for all else."""
    return not architecture.is_amd and architecture.name not in READS_OPERANDS_FROM_SHARED_MEMORY


def _reshapes(spec: Spec) -> bool:
    """Whether tiles of some cache take another shape on their way to a product."""
    return any(layout[-1] != Axis("dim") for layout in (spec.k_layout, spec.v_layout))


def _reduces(spec: Spec) -> bool:
    """Whether it takes a reduction over all rows to tell which keys some row sees."""
    return spec.has_mask and not bounds_tell(spec, surroundings(spec))


def _takes_low_tiles(spec: Spec, architecture: Architecture) -> bool:
    qk, v, _ = head_dim_pieces(spec.head_dim_qk, spec.head_dim_v)
    is_narrow = min(piece.extent for piece in (*qk, *v)) < NARROW
    is_short = spec.query_max is not None and spec.query_max * spec.group <= LOW_ROWS
    return is_short or (is_narrow and architecture.name in HAS_WGMMA)


def named_configs(spec: Spec) -> Mapping[str, Config]:
    """Low tiles that fit every chip: for batches of few tokens, and tensors that cannot be read in 16-byte loads."""
    low_keys = (32, 16) if spec.has_score or _reshapes(spec) else (64, 32, 16)
    shapes = [(LOW_ROWS, keys, stages) for keys in low_keys for stages in (2, 1)] + [(16, 16, 1)]
    low: Config | None = None
    for rows, keys, stages in shapes:
        constants = tiles(spec, rows, keys)
        needed = {chip: shared_bytes(spec, constants, stages, chip) for chip in ARCHITECTURES}
        low = Config(constants, 4, stages, max(needed.values()))
        if all(size <= chip.shared_bytes for chip, size in needed.items()):
            break
    assert low is not None
    return {"low": low, "unaligned": low}
