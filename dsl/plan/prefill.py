"""The portable kernel for `packed x packed`: what its template prints and the tiles it runs with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsl.architecture import UNLISTED, Architecture
from dsl.expr.intervals import Interval
from dsl.expr.statements import KEYS, ROWS, Computed, Value
from dsl.expr.to_triton import BOTH
from dsl.layout import DimPiece
from dsl.plan.module import Argument, Config, KernelPlan
from dsl.plan.shaping import (
    PLAIN,
    Shaping,
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
from dsl.spec import ITEMSIZE, Spec

SEARCH = 32
TILES_SCANNED = 64
MOST_WARPS = 8
TEMPLATE = "kernels/prefill.py.jinja"
MOST_TOKENS = 2**30
"""Packed tokens of one launch, which the launcher checks."""
_ROW, _KEY = frozenset((ROWS,)), frozenset((KEYS,))


@dataclass(frozen=True, slots=True)
class PieceLoad:
    """One load of a tile of keys or values and the dot that follows it."""

    suffix: str
    size: str
    mask: str | None
    carry: str


@dataclass(frozen=True, slots=True)
class Step:
    """The loads of one turn of the loop over whole tiles, or of a partial tile, and the lines of its expressions.

    `visible` is printed where scores are tested.
    """

    partial: bool
    tests: tuple[str, ...]
    score: tuple[str, ...]
    visible: str
    key_loads: tuple[PieceLoad, ...]
    value_loads: tuple[PieceLoad, ...]


@dataclass(frozen=True, slots=True)
class PrefillKernel(KernelPlan):
    qk_pieces: tuple[DimPiece, ...]
    v_pieces: tuple[DimPiece, ...]
    lse: bool
    precision: str
    whole: Step
    partial: Step
    shaping: Shaping = PLAIN

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
    def wide_strides(self) -> tuple[str, ...]:
        """Strides that always count in 64 bits."""
        return tuple(name for name in STRIDES if name not in self.tile_strides)

    @property
    def tile_strides(self) -> tuple[str, ...]:
        """Strides within a tile, which count in 64 bits only where a tile is that large."""
        return ("stride_k_token", "stride_v_token")


STRIDES = tuple(f"stride_{tensor}_{axis}" for tensor in ("q", "k", "v", "out") for axis in ("token", "head"))
INTEGERS = ("num_seqs", "q_tokens", "kv_tokens", "search_step", "stride_cu_q", "stride_cu_k")


def _step(partial: bool, qk: tuple[DimPiece, ...], v: tuple[DimPiece, ...], shaping: Shaping) -> Step:
    lines = shaping.partial if partial else shaping.full
    seen = "seen" if shaping.masked else "live"

    def mask(token: str, dim: str | None) -> str | None:
        tests = ([token] if partial else []) + ([dim] if dim else [])
        return " & ".join(tests) or None

    keys = tuple(
        PieceLoad(
            piece.suffix,
            piece.size,
            mask("live[None, :]", f"(q_dims{piece.suffix}[:, None] < {piece.live})" if piece.live else None),
            ", scores" if number else "",
        )
        for number, piece in enumerate(qk)
    )
    values = tuple(
        PieceLoad(
            piece.suffix,
            piece.size,
            mask(f"{seen}[:, None]", f"(v_dims{piece.suffix}[None, :] < {piece.live})" if piece.live else None),
            "",
        )
        for piece in v
    )
    return Step(partial, lines.tests, lines.score, lines.visible or "live[None, :]", keys, values)


def surroundings(spec: Spec) -> Surroundings:
    """What the kernel has in scope for expressions: rows are query tokens of one head."""
    tokens, length = Interval(0, MOST_TOKENS - 1), Interval(0, MOST_TOKENS)
    names = {
        "q": Computed("q_position", "kv_len - end + tl.minimum(row, end - 1)", "int32", _ROW),
        "kv": Computed("kv_position", "tile + token", "int32", _KEY),
        "h": Value("head", "int32"),
        "kv_head": Value("kv_head", "int32"),
        "b": Value("segment", "int32"),
        "q_token": Computed("q_token", "tl.minimum(row, end - 1)", "int32", _ROW),
        "kv_token": Computed("kv_token", "kv_start + tile + token", "int32", _KEY),
        "kv_start": Value("kv_start", "int32"),
        "q_len": Computed("q_len", "end - start", "int32"),
        "kv_len": Value("kv_len", "int32"),
        "score": Value("score", "float", BOTH),
    }
    ranges = {
        "q": Interval(-MOST_TOKENS, MOST_TOKENS - 1),
        **dict.fromkeys(("kv", "q_token", "kv_token"), tokens),
        **dict.fromkeys(("q_len", "kv_len", "kv_start"), length),
        "h": Interval(0, spec.heads - 1),
        "kv_head": Interval(0, spec.kv_heads - 1),
        "b": Interval(0, 2**31 - 1),
    }
    return Surroundings(names, ranges, "BLOCK_Q", "BLOCK_KV", "live", "seen", "kv_len", "owned")


def kernel(spec: Spec, name: str, source: Source) -> tuple[PrefillKernel, dict[str, float]]:
    """The kernel text of a block and the constants of the block that it is launched with."""
    qk, v, dims = head_dim_pieces(spec.head_dim_qk, spec.head_dim_v)
    shaping = shape(spec, source, surroundings(spec))
    constants = {**scales(spec, shaping), "GROUP": spec.group, **dims, "SEARCH": SEARCH}
    if shaping.scan:
        constants["TILES_SCANNED"] = TILES_SCANNED
    if isinstance(spec.scale, float) and spec.scale <= 0 and not shaping.scored:
        constants |= {"SCALE_LOG2": abs(spec.scale or 1.0) * LOG2_E, "SIGN": -1.0 if spec.scale else 0.0}
    integers = (*INTEGERS, *STRIDES, *(("stride_lse_head", "stride_lse_token") if spec.lse else ()))
    arguments = (
        *(Argument(tensor, "pointer", "data") for tensor in ("q", "k", "v")),
        *(Argument(tensor, "pointer", "index") for tensor in ("cu_seqlens_q", "cu_seqlens_k")),
        Argument("out", "pointer", "data"),
        *((Argument("out_lse", "pointer", "fp32"),) if spec.lse else ()),
        *(Argument(integer, "integer", "int32") for integer in integers),
        *shaping.arguments,
        *(Argument(constant, "constant", "") for constant in (*constants, *tiles(0, 0), "ALIGNMENT", "INDEX")),
    )
    plan = PrefillKernel(
        name=name,
        template=TEMPLATE,
        arguments=arguments,
        qk_pieces=qk,
        v_pieces=v,
        lse=spec.lse,
        precision=', input_precision="ieee"' if spec.dtype == "fp32" else "",
        whole=_step(False, qk, v, shaping),
        partial=_step(True, qk, v, shaping),
        shaping=shaping,
    )
    return plan, constants


def tiles(block_q: int, block_kv: int, row_parts: int = 1) -> dict[str, int]:
    """The constants of a configuration. `row_parts` may be 8 where a thread holds every eighth column of scores."""
    return {"BLOCK_Q": block_q, "BLOCK_KV": block_kv, "ROW_PARTS": row_parts}


def shared_bytes(spec: Spec, constants: Mapping[str, int], num_stages: int, architecture: Architecture) -> int:
    """An upper bound on the shared memory of one block.

    AMD's compiler keeps one operand at a time there; NVIDIA's keeps Q and the stages of K and V, and P in registers.
    Which keys some row sees may be reduced over all rows, and so all warps; params read by pair are staged as well.
    """
    size = ITEMSIZE[spec.dtype]
    rows, columns = constants["BLOCK_Q"], constants["BLOCK_KV"]
    qk, v, _ = head_dim_pieces(spec.head_dim_qk, spec.head_dim_v)
    qk_dim, v_dim = sum(piece.extent for piece in qk), sum(piece.extent for piece in v)
    if architecture.is_amd:
        return size * (max(rows, columns) * max(qk_dim, v_dim) + rows * columns)
    reductions = 1024 + (4 * MOST_WARPS * columns if has_expressions(spec) else 0)
    tables = rows * columns * pair_bytes(spec, surroundings(spec)) * max(num_stages - 1, 1)
    return size * (rows * qk_dim + num_stages * columns * (qk_dim + v_dim)) + reductions + tables


def configs(spec: Spec, architecture: Architecture) -> tuple[Config, ...]:
    """Candidates for one architecture, best first."""
    dim = max(spec.head_dim_qk, spec.head_dim_v)
    if spec.dtype == "fp32":
        shapes = [(64, 32, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1)]
    elif architecture.is_amd:
        shapes = [(128, 64, 4, 1), (64, 64, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)]
    elif 64 < dim <= 128 and spec.has_mask and not bounds_tell(spec, surroundings(spec)):
        # The reduction over rows takes registers that scores of 64 keys leave too few of.
        shapes = [(128, 32, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 2)]
    elif dim <= 128:
        shapes = [(128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 2)]
    else:
        shapes = [(128, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2), (16, 16, 4, 2)]
    launches = [(tiles(block_q, block_kv), warps, stages) for block_q, block_kv, warps, stages in shapes]
    # What was measured without expressions leaves no registers for them.
    measured = None if has_expressions(spec) else tuned(spec, architecture.name)
    if measured is not None:
        constants = {name: measured[name] for name in tiles(0, 0)}
        launches.insert(0, (constants, measured["num_warps"], measured["num_stages"]))
    return tuple(
        Config(constants, warps, stages, shared_bytes(spec, constants, stages, architecture))
        for constants, warps, stages in launches
    )


def named_configs(spec: Spec) -> Mapping[str, Config]:
    """The tiles for tensors that cannot be read in 16-byte loads.

    Such loads are not pipelined, and outside of a pipelined loop ptxas gets the descriptors of narrow wgmma operands
    wrong. 32 query rows are too few for a wgmma.
    """
    candidates = [
        Config(constants, 4, 1, shared_bytes(spec, constants, 1, UNLISTED))
        for constants in (tiles(32, 32), tiles(16, 16))
    ]
    fitting = [config for config in candidates if config.shared_bytes <= UNLISTED.shared_bytes]
    return {"unaligned": (fitting or candidates[-1:])[0]}
