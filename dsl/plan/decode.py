"""The portable kernel for `single x paged`: what its template prints and the tiles it runs with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsl.architecture import Architecture
from dsl.expr.intervals import Interval
from dsl.expr.statements import KEYS, ROWS, Computed, Value
from dsl.expr.to_triton import BOTH
from dsl.layout import CacheAccess, DimPiece, Tile, contiguous_slots, paged_cache
from dsl.plan.module import Argument, Config, KernelPlan
from dsl.plan.shaping import PLAIN, Shaping, Surroundings, has_expressions, scales, shape
from dsl.plan.tiles import head_dim_pieces, next_power_of_two
from dsl.plan.tuned import tuned
from dsl.source import Source
from dsl.spec import ITEMSIZE, Spec

TEMPLATE = "kernels/decode.py.jinja"
MOST_KEYS = 2**31 - 2**16
"""Keys that a row of the table holds at most, which the launcher checks."""
OUTER_STRIDES = tuple(f"stride_{tensor}_{axis}" for tensor in ("q", "out") for axis in ("seq", "head"))


@dataclass(frozen=True, slots=True)
class KeyDot:
    """One dot of the query piece with a piece of the key tile; later pieces add to the scores of earlier ones."""

    tile: Tile
    carry: str

    @property
    def suffix(self) -> str:
        return self.tile.suffix


@dataclass(frozen=True, slots=True)
class DecodeKernel(KernelPlan):
    qk_pieces: tuple[DimPiece, ...]
    v_pieces: tuple[DimPiece, ...]
    k: CacheAccess
    v: CacheAccess
    head_dim_v: str
    split: str
    lse: bool
    precision: str
    rows: str = "GROUP_TILE"
    shaping: Shaping = PLAIN

    @property
    def visits_ranges(self) -> bool:
        """Whether the loop is over the tiles that some row sees."""
        return self.shaping.masked

    @property
    def functions(self) -> frozenset[str]:
        """The functions that expressions call."""
        return self.shaping.functions

    @property
    def visible(self) -> str:
        """The printed test of the keys that a row sees."""
        return self.shaping.partial.visible or "token_live[None, :]"

    @property
    def sees_all(self) -> bool:
        """Whether every key of the sequence is seen."""
        return not self.shaping.masked

    @property
    def two_ranges(self) -> bool:
        return self.shaping.two_ranges

    @property
    def chunk_stop(self) -> str:
        """The printed end of the keys that may be read."""
        return "seq_len" if self.two_ranges else "stop"

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
    def positions(self) -> tuple[tuple[str, str, str], ...]:
        tokens = (("token_offsets", "tl.arange(0, TILE)", "[TILE]"),)
        chunks = (
            ("chunk_offsets", "tl.arange(0, TILE // CHUNK) * CHUNK", "[TILE // CHUNK]"),
            ("in_chunk", "tl.arange(0, CHUNK)", "[CHUNK]"),
        )
        return tokens + (chunks if self.chunked else ())

    @property
    def key_dots(self) -> tuple[KeyDot, ...]:
        return tuple(KeyDot(tile, ", scores" if number else "") for number, tile in enumerate(self.k.tiles))

    @property
    def wide_strides(self) -> tuple[str, ...]:
        """Strides between sequences, heads and pages, which always count in 64 bits."""
        return tuple(name for name in _aligned(self.k, self.v) if name not in self.page_strides)

    @property
    def page_strides(self) -> tuple[str, ...]:
        """Strides within a page, which count in 64 bits only where a page is that large."""
        return tuple(name for cache in self.caches for name in cache.page_strides)

    @property
    def may_split(self) -> bool:
        return self.split != "none"

    @property
    def split_auto(self) -> bool:
        return self.split == "auto"

    @property
    def split_fixed(self) -> bool:
        return self.split == "fixed"

    @property
    def split_none(self) -> bool:
        return self.split == "none"

    @property
    def needs_lse(self) -> bool:
        return self.lse or self.may_split


def _aligned(k: CacheAccess, v: CacheAccess) -> tuple[str, ...]:
    return (*OUTER_STRIDES, *(name for name, _ in k.strides), *(name for name, _ in v.strides))


def surroundings(spec: Spec) -> Surroundings:
    """What the kernel has in scope for expressions: rows are query heads, all at the last key's position."""
    row, key = frozenset((ROWS,)), frozenset((KEYS,))
    position, sequence = Value("token_position", "int32", key), Computed("sequence", "seq.to(tl.int32)", "int32")
    names = {
        "q": Computed("q_position", "seq_len - 1", "int32"),
        "kv": position,
        "h": Computed("head_index", "kv_head * GROUP + tl.minimum(group, GROUP - 1)", "int32", row),
        "kv_head": Value("kv_head", "int32"),
        "b": sequence,
        "q_token": sequence,
        "kv_token": position,
        "kv_start": Value("0", "int32", constant=0),
        "q_len": Value("1", "int32", constant=1),
        "kv_len": Value("seq_len", "int32"),
        "score": Value("score", "float", BOTH),
    }
    ranges = {
        "q": Interval(-1, MOST_KEYS - 1),
        **dict.fromkeys(("kv", "kv_token"), Interval(0, MOST_KEYS - 1)),
        **dict.fromkeys(("b", "q_token"), Interval(0, 2**31 - 1)),
        "kv_start": Interval(0, 0),
        "q_len": Interval(1, 1),
        "kv_len": Interval(0, MOST_KEYS),
        "h": Interval(0, spec.heads - 1),
        "kv_head": Interval(0, spec.kv_heads - 1),
    }
    carries_sink = None if spec.split.kind == "none" else "tl.program_id(1) == 0"
    return Surroundings(names, ranges, "GROUP_TILE", "TILE", "token_live", "token_seen", "seq_len", carries_sink)


def kernel(spec: Spec, name: str, source: Source) -> tuple[DecodeKernel, dict[str, float]]:
    """The kernel text of a block and the constants of the block that it is launched with."""
    qk, v, dims = head_dim_pieces(spec.head_dim_qk, spec.head_dim_v)
    shaping = shape(spec, source, surroundings(spec))
    k_access = paged_cache("k_cache", "k", spec.k_layout, qk)
    v_access = paged_cache("v_cache", "v", spec.v_layout, v, "token_seen" if shaping.masked else "token_live")
    assert spec.block is not None
    group_tile = _group_tile(spec)
    constants: dict[str, float] = {
        **scales(spec, shaping),
        "KV_HEADS": spec.kv_heads,
        "GROUP": spec.group,
        "GROUP_TILE": group_tile,
        "HEAD_TILES": -(-spec.group // group_tile),
        **dims,
        "BLOCK": spec.block,
    }
    if spec.split.kind == "fixed":
        assert spec.split.keys is not None
        constants["SPLIT_KEYS"] = spec.split.keys
    chunked = k_access.chunked or v_access.chunked
    tile_constants = ("TILE", *(("CHUNK",) if chunked else ()), "ALIGNMENT", "INDEX")
    splits = spec.split.kind != "none"
    integers = (
        *(("num_splits",) if splits else ()),
        "table_width",
        *("stride_table_seq", "stride_table_page", "stride_seq_lens"),
        *_aligned(k_access, v_access),
        *(("stride_lse_seq", "stride_lse_head") if spec.lse else ()),
    )
    arguments = (
        Argument("query", "pointer", "data"),
        Argument("k_cache", "pointer", "cache"),
        Argument("v_cache", "pointer", "cache"),
        *(Argument(tensor, "pointer", "index") for tensor in ("block_tables", "seq_lens")),
        Argument("out", "pointer", "data"),
        *((Argument("out_lse", "pointer", "fp32"),) if spec.lse else ()),
        *(Argument(tensor, "pointer", "fp32", varies=False) for tensor in ("split_out", "split_lse") if splits),
        *(Argument(integer, "integer", "int32") for integer in integers),
        *shaping.arguments,
        *(Argument(constant, "constant", "") for constant in (*constants, *tile_constants)),
    )
    plan = DecodeKernel(
        name=name,
        template=TEMPLATE,
        arguments=arguments,
        qk_pieces=qk,
        v_pieces=v,
        k=k_access,
        v=v_access,
        head_dim_v="HEAD_DIM" if "HEAD_DIM" in dims else "HEAD_DIM_V",
        split=spec.split.kind,
        lse=spec.lse,
        precision=', input_precision="ieee"' if spec.dtype == "fp32" else "",
        shaping=shaping,
    )
    return plan, constants


def _group_tile(spec: Spec) -> int:
    """Query heads of one program: those that share a KV head, padded to a dot, as long as the accumulator is small."""
    widest = max(16, 8192 // next_power_of_two(spec.head_dim_v))
    return min(max(16, next_power_of_two(spec.group)), widest, 64)


def _chunk(spec: Spec, tile: int) -> int:
    """Slots of one chunk: contiguous, in one page, and at least two chunks a tile, or Triton loads them one by one."""
    assert spec.block is not None
    runs = [
        contiguous_slots(layout, spec.block) for layout in (spec.k_layout, spec.v_layout) if layout[-1].name == "slot"
    ]
    return min(tile // 2, *runs) if runs else 0


def shared_bytes(spec: Spec, constants: Mapping[str, int], num_stages: int) -> int:
    """An upper bound on the shared memory of one block: Q, K, V and P before a dot, or the sums on their way out."""
    size = ITEMSIZE[spec.dtype]
    tile, group = constants["TILE"], _group_tile(spec)
    qk, v, _ = head_dim_pieces(spec.head_dim_qk, spec.head_dim_v)
    qk_dim, v_dim = sum(piece.extent for piece in qk), sum(piece.extent for piece in v)
    operands = size * (max(num_stages, 1) * tile * (qk_dim + v_dim) + group * (qk_dim + tile)) + 4096
    return max(operands, 4 * group * max(qk_dim, v_dim))


def configs(spec: Spec, architecture: Architecture) -> tuple[Config, ...]:
    """Candidates for one architecture, best first."""
    dim = max(spec.head_dim_qk, spec.head_dim_v)
    warps = 4 if dim <= 256 else 8
    largest = (64 if dim <= 128 else 32) * 2 // ITEMSIZE[spec.dtype]
    tiles = [tile for tile in (64, 32, 16) if tile <= largest]
    shapes = [(tile, warps, 1) for tile in tiles]
    # What was measured leaves no registers for more than how queries meet all keys.
    measured = None if has_expressions(spec) else tuned(spec, architecture.name)
    if measured is not None:
        shapes.insert(0, (measured["TILE"], measured["num_warps"], measured["num_stages"]))
    result = []
    for tile, warps, stages in shapes:
        chunk = _chunk(spec, tile)
        constants = {"TILE": tile, **({"CHUNK": chunk} if chunk else {})}
        result.append(Config(constants, warps, stages, shared_bytes(spec, constants, stages)))
    return tuple(result)


def named_configs(spec: Spec) -> Mapping[str, Config]:
    """Tensors that cannot be read in 16-byte loads take the same tiles."""
    return {}
