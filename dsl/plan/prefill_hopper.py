"""The Hopper kernel for `packed x packed`: the blocks it runs, what its template prints, and its tiles."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from dsl.plan.module import Argument, HopperPlan, KernelPlan, MergePlan
from dsl.plan.prefill import INTEGERS
from dsl.plan.shaping import fields_of_expressions, has_expressions
from dsl.plan.tiles import LOG2_E, head_dim_pieces, next_power_of_two
from dsl.plan.tuned import work_times
from dsl.spec import ITEMSIZE, Spec

TEMPLATE = "kernels/prefill_hopper.py.jinja"
MERGE_TEMPLATE = "kernels/prefill_merge.py.jinja"
ARCHITECTURE = "sm90"
LARGEST_HEAD_DIM = 256
CONSUMER_ROWS = 64
SHARED_BYTES = 232_448
"""What one program may have: it has the processor for itself."""
SMALL_BYTES = 8192
"""Barriers, the fields of tiles, and what threads trade results through, beside the tiles of numbers."""
REGISTERS = {2: (232, 40), 3: (160, 32)}
"""What a thread of a consumer and of the producer may use, for each number of consumers."""
RISE = 8.0
"""A running maximum stays as it is while no score, to the base 2, exceeds it by more."""
MERGE_ROWS = 4
MERGED_SPLITS = (2, 4, 8, 16)
"""A merge is compiled for these numbers of splits, and takes fewer."""
SPLIT_UNIT = 4
"""Numbers beside a split's row, so that rows stay aligned to 16 bytes; the first is its log-sum-exp."""


@dataclass(frozen=True, slots=True)
class QkPiece:
    """One piece of the head dimension of queries and keys: its tiles, and the wgmma that adds it to the scores."""

    suffix: str
    size: str
    start: str
    carries: bool


@dataclass(frozen=True, slots=True)
class VPiece:
    """One piece of the head dimension of values: its tiles, and the wgmma that adds it to the result.

    Gluon's shapes are powers of two. A `ptx` piece of another size has columns of a wider tensor, `width` of them, and
    its wgmma is written out.
    """

    suffix: str
    size: str
    start: str
    extent: int
    ptx: bool

    @property
    def native(self) -> bool:
        return not self.ptx

    @property
    def width(self) -> str:
        return "SIZES.BLOCK_KV" if self.ptx else self.size

    @property
    def box(self) -> int:
        """Columns in shared memory: halves of 64, where the wgmma is written out."""
        return max(64, next_power_of_two(self.extent)) if self.ptx else self.extent


@dataclass(frozen=True, slots=True)
class HopperKernel(KernelPlan):
    qk_pieces: tuple[QkPiece, ...]
    v_pieces: tuple[VPiece, ...]
    v_dim: str
    consumer_count: int
    speculative: bool
    lse: bool

    @property
    def consumers(self) -> tuple[int, ...]:
        return tuple(range(self.consumer_count))

    @property
    def accs(self) -> str:
        """The pieces of the result."""
        return ", ".join(f"acc{piece.suffix}" for piece in self.v_pieces)

    @property
    def running_max(self) -> str:
        return str(not self.speculative)

    @property
    def first_suffix(self) -> str:
        return self.qk_pieces[0].suffix

    @property
    def ptx_piece(self) -> VPiece | None:
        return next((piece for piece in self.v_pieces if piece.ptx), None)

    @property
    def maps(self) -> tuple[str, ...]:
        """The tensor maps."""
        return tuple(argument.name for argument in self.arguments if argument.kind == "map")

    @property
    def _tiles(self) -> tuple[str, ...]:
        pieces = tuple(f"{tensor}_tiles{piece.suffix}" for piece in self.qk_pieces for tensor in ("q", "k"))
        values = tuple(f"v_tiles{piece.suffix}" for piece in self.v_pieces)
        failures = ("failures",) if self.speculative else ()
        return (*pieces, *values, "tiles", "told", *failures, "q_ready", "q_free", "k_ready", "v_ready")

    @property
    def load_arguments(self) -> tuple[str, ...]:
        """What the warp that loads takes."""
        return (*self.maps, *self._tiles, "cu_seqlens_q", "cu_seqlens_k", *INTEGERS, *WORK)

    @property
    def attend_arguments(self) -> tuple[str, ...]:
        """What a warpgroup that attends takes."""
        address = ("v_address",) if self.ptx_piece else ()
        lse = ("out_lse", "stride_lse_head", "stride_lse_token") if self.lse else ()
        results = ("out", "stride_out_token", "stride_out_head", "split_out")
        return (*self._tiles, *address, *results, *lse)

    @property
    def worker_warps(self) -> str:
        """Warps of all partitions but the first, which has four."""
        return ", ".join(["4"] * (self.consumer_count - 1) + ["1"])

    @property
    def worker_registers(self) -> str:
        return ", ".join(["CONSUMER_REGISTERS"] * (self.consumer_count - 1) + ["PRODUCER_REGISTERS"])


@dataclass(frozen=True, slots=True)
class MergeKernel(KernelPlan):
    lse: bool


WORK = ("height", "slots", "head_slots", "items", "whole_tiles", "num_splits")
"""How the tiles of all heads are handed out to programs."""


def reason_against(spec: Spec) -> str | None:
    """Why the Hopper kernel does not run a block, None where it does."""
    if spec.targets is not None and "hopper" not in spec.targets:
        return "`targets` leaves it out"
    if spec.dtype == "fp32":
        return "it computes in bf16 and fp16"
    if max(spec.head_dim_qk, spec.head_dim_v) > LARGEST_HEAD_DIM:
        return f"its head_dim is at most {LARGEST_HEAD_DIM}"
    if has_expressions(spec):
        return f"it knows no {', '.join(fields_of_expressions(spec))}"
    if not (isinstance(spec.scale, float) and spec.scale > 0):
        return "it takes the maximum of a row before the scale, which must be positive"
    return None


def speculates(spec: Spec) -> bool:
    """Whether the softmax keeps the first tile's maximum as its offset, to be checked at the end.

    A bf16 weight has the range of float32: a score may exceed the offset by 44 nats. In fp16 it is 11, and keys whose
    norms grow fourfold fail in every tile.
    """
    return spec.softmax == "auto" and spec.dtype == "bf16"


def hopper(spec: Spec, name: str) -> HopperPlan:
    """The kernel of a block, its numbers and the boxes of its tensor maps."""
    qk, _, dims = head_dim_pieces(spec.head_dim_qk, spec.head_dim_v)
    v_dim = "HEAD_DIM" if spec.head_dim_qk == spec.head_dim_v else "HEAD_DIM_V"
    dims = {name: value for name, value in dims.items() if not name.startswith("V_DIM_")}
    values, sizes = _v_pieces(spec.head_dim_v, v_dim)
    qk_width = sum(piece.extent for piece in qk)
    v_width = sum(piece.box for piece in values)
    itemsize = ITEMSIZE[spec.dtype]
    consumers, block_kv, stages, q_stages = _shape(spec, qk_width, v_width)
    assert isinstance(spec.scale, float)
    consumer_registers, producer_registers = REGISTERS[consumers]
    constants = {
        "SCALE_LOG2": spec.scale * LOG2_E,
        "HEADS": spec.heads,
        "GROUP": spec.group,
        **dims,
        **sizes,
        "QK_WIDTH": qk_width,
        "V_WIDTH": v_width,
        **_ptx_bytes(values, block_kv * itemsize),
        "ALIGNMENT": 16 // itemsize,
        "CONSUMERS": consumers,
        "BLOCK_Q": CONSUMER_ROWS * consumers,
        "BLOCK_KV": block_kv,
        "STAGES": stages,
        "Q_STAGES": q_stages,
        "RISE": RISE,
        "SPLIT_WIDTH": spec.head_dim_v + SPLIT_UNIT,
        "CONSUMER_REGISTERS": consumer_registers,
        "PRODUCER_REGISTERS": producer_registers,
    }
    boxes: dict[str, tuple[int, ...]] = {}
    for piece in qk:
        boxes[f"q_map{piece.suffix}"] = (CONSUMER_ROWS, 1, piece.extent)
        boxes[f"k_map{piece.suffix}"] = (block_kv, 1, piece.extent)
    boxes |= {f"v_map{piece.suffix}": (1, 1, block_kv, 1, piece.box) for piece in values}
    integers = (*INTEGERS, *WORK, "stride_out_token", "stride_out_head")
    integers += ("stride_lse_head", "stride_lse_token") if spec.lse else ()
    arguments = (
        *(Argument(box, "map", "data") for box in boxes),
        *(Argument(tensor, "pointer", "index") for tensor in ("cu_seqlens_q", "cu_seqlens_k")),
        Argument("out", "pointer", "data", varies=False),
        Argument("split_out", "pointer", "fp32", varies=False),
        *((Argument("out_lse", "pointer", "fp32"),) if spec.lse else ()),
        *(Argument(integer, "integer", "int32") for integer in integers),
        *(Argument(constant, "constant", "") for constant in constants),
    )
    kernel = HopperKernel(
        name=name,
        template=TEMPLATE,
        arguments=arguments,
        qk_pieces=tuple(
            QkPiece(piece.suffix, _sized(piece.size), _sized(piece.start), carries=number > 0)
            for number, piece in enumerate(qk)
        ),
        v_pieces=values,
        v_dim=_sized(v_dim),
        consumer_count=consumers,
        speculative=speculates(spec),
        lse=spec.lse,
    )
    shared_bytes = _shared_bytes(itemsize, consumers, block_kv, stages, q_stages, qk_width, v_width)
    return HopperPlan(
        kernel,
        constants,
        boxes,
        num_warps=4,
        shared_bytes=shared_bytes,
        merge=_merge(spec, constants),
        merged_splits=MERGED_SPLITS,
        times=work_times(ARCHITECTURE),
    )


def _v_pieces(dim: int, name: str) -> tuple[tuple[VPiece, ...], dict[str, int]]:
    """The pieces of the values' head dimension and the constants that name their sizes.

    A piece beyond 64 columns that is no power of two has as many keys in a tile as its tensor has columns.
    """
    extents = _v_extents(dim)
    if len(extents) == 1:
        return (VPiece("", _sized(name), "0", dim, _is_ptx(dim)),), {}
    pieces = []
    sizes = {}
    for number, extent in enumerate(extents):
        start = _sized(" + ".join(f"V_DIM_{before}" for before in range(number)) or "0")
        pieces.append(VPiece(f"_{number}", _sized(f"V_DIM_{number}"), start, extent, _is_ptx(extent)))
        sizes[f"V_DIM_{number}"] = extent
    return tuple(pieces), sizes


def _sized(expression: str) -> str:
    """An expression of constants as the kernel's functions print it: they get all constants as SIZES."""
    return " + ".join(name if name.isdigit() else f"SIZES.{name}" for name in expression.split(" + "))


def _ptx_bytes(pieces: tuple[VPiece, ...], column_bytes: int) -> dict[str, int]:
    """The bytes from one stage to the next of the piece whose wgmma is written out."""
    return next(({"V_BYTES": piece.box * column_bytes} for piece in pieces if piece.ptx), {})


def _is_ptx(extent: int) -> bool:
    return extent < 16 or next_power_of_two(extent) != extent


def _v_extents(dim: int) -> tuple[int, ...]:
    if dim <= 128:
        return (dim,)
    rest = dim - 128
    return (128, rest) if rest <= 64 or rest == 128 else (128, 64, rest - 64)


def _shape(spec: Spec, qk_width: int, v_width: int) -> tuple[int, int, int, int]:
    """Consumers, keys of a tile, stages of keys and of queries: three consumers where that leaves enough registers."""
    itemsize = ITEMSIZE[spec.dtype]
    if spec.head_dim_v <= 72 and qk_width <= 128:
        candidates = [(3, 128, 3), (3, 128, 2)]
    elif spec.head_dim_v <= 128:
        candidates = [(2, 128, 3), (2, 128, 2), (2, 64, 2)] if spec.head_dim_v < 128 else [(2, 128, 2), (2, 64, 2)]
    else:
        candidates = [(2, 64, 3), (2, 64, 2)]
    for candidate, q_stages in product(candidates, (2, 1)):
        if _shared_bytes(itemsize, *candidate, q_stages, qk_width, v_width) <= SHARED_BYTES:
            return *candidate, q_stages
    raise AssertionError("every head dimension that the kernel takes fits")


def _shared_bytes(
    itemsize: int, consumers: int, block_kv: int, stages: int, q_stages: int, qk_width: int, v_width: int
) -> int:
    rows, columns = q_stages * CONSUMER_ROWS * consumers, stages * block_kv
    return itemsize * (rows * qk_width + columns * (qk_width + v_width)) + SMALL_BYTES


def _merge(spec: Spec, constants: dict[str, int | float]) -> MergePlan:
    """The kernel that merges the splits of a tile of queries."""
    numbers = {
        "HEADS": spec.heads,
        "HEAD_DIM": spec.head_dim_v,
        "DIM_PADDED": next_power_of_two(spec.head_dim_v),
        "ALIGNMENT": 16 // ITEMSIZE[spec.dtype],
        "BLOCK_Q": int(constants["BLOCK_Q"]),
        "SPLIT_WIDTH": spec.head_dim_v + SPLIT_UNIT,
        "ROWS": MERGE_ROWS,
    }
    integers = ("head_slots", "whole_tiles", "num_splits", "stride_out_token", "stride_out_head")
    integers += ("stride_lse_head", "stride_lse_token") if spec.lse else ()
    arguments = (
        Argument("split_out", "pointer", "fp32", varies=False),
        Argument("out", "pointer", "data", varies=False),
        *((Argument("out_lse", "pointer", "fp32"),) if spec.lse else ()),
        *(Argument(integer, "integer", "int32") for integer in integers),
        *(Argument(constant, "constant", "") for constant in (*numbers, "SPLITS")),
    )
    kernel = MergeKernel(name="_prefill_merge_kernel", template=MERGE_TEMPLATE, arguments=arguments, lse=spec.lse)
    return MergePlan(kernel, numbers, num_warps=4)
