"""The Hopper kernel for `packed x packed`: the blocks it runs, what its template prints, and its tiles."""

from __future__ import annotations

from dataclasses import dataclass

from dsl.plan.module import Argument, HopperPlan, KernelPlan
from dsl.plan.prefill import INTEGERS, SEARCH
from dsl.plan.tiles import LOG2_E, head_dim_pieces
from dsl.spec import ITEMSIZE, Spec

TEMPLATE = "kernels/prefill_hopper.py.jinja"
ARCHITECTURE = "sm90"
HEAD_DIMS = (64, 72, 80, 96, 112, 128)
BLOCK_KV = 128
CONSUMER_ROWS = 64
REGISTERS = {2: (240, 24), 3: (160, 32)}
"""What a thread of a consumer and of the producer may use, for each number of consumers."""


@dataclass(frozen=True, slots=True)
class QkPiece:
    """One piece of the head dimension of queries and keys: its tiles, and the wgmma that adds it to the scores."""

    suffix: str
    size: str
    start: str
    carries: bool


@dataclass(frozen=True, slots=True)
class HopperKernel(KernelPlan):
    qk_pieces: tuple[QkPiece, ...]
    ptx_values: bool
    consumer_count: int
    lse: bool
    language: str = "gl"
    search_lanes: str = "gl.arange(0, SEARCH, LANES)"

    @property
    def consumers(self) -> tuple[int, ...]:
        return tuple(range(self.consumer_count))

    @property
    def maps(self) -> tuple[str, ...]:
        """The tensor maps."""
        return tuple(argument.name for argument in self.arguments if argument.kind == "map")

    @property
    def _tiles(self) -> tuple[str, ...]:
        pieces = tuple(f"{tensor}_tiles{piece.suffix}" for piece in self.qk_pieces for tensor in ("q", "k"))
        return (*pieces, "v_tiles", "q_ready", "k_ready", "v_ready")

    @property
    def load_arguments(self) -> tuple[str, ...]:
        """What the warp that loads takes before the tile's numbers."""
        return (*self.maps, *self._tiles)

    @property
    def attend_arguments(self) -> tuple[str, ...]:
        """What a warpgroup that attends takes before the tile's numbers."""
        address = ("v_address",) if self.ptx_values else ()
        lse = ("out_lse", "stride_lse_head", "stride_lse_token") if self.lse else ()
        return (*self._tiles, *address, "out", "stride_out_token", "stride_out_head", *lse)

    @property
    def qk_sizes(self) -> tuple[str, ...]:
        """The names of the pieces' sizes."""
        return tuple(piece.size for piece in self.qk_pieces)

    @property
    def acc_width(self) -> str:
        """Columns of the tensor that carries the result: Gluon's shapes are powers of two."""
        return "BLOCK_KV" if self.ptx_values else "HEAD_DIM"

    @property
    def worker_warps(self) -> str:
        """Warps of all partitions but the first, which has four."""
        return ", ".join(["4"] * (self.consumer_count - 1) + ["1"])

    @property
    def worker_registers(self) -> str:
        return ", ".join(["CONSUMER_REGISTERS"] * (self.consumer_count - 1) + ["PRODUCER_REGISTERS"])


def reason_against(spec: Spec) -> str | None:
    """Why the Hopper kernel does not run a block, None where it does."""
    if spec.targets is not None and "hopper" not in spec.targets:
        return "`targets` leaves it out"
    if spec.dtype == "fp32":
        return "it computes in bf16 and fp16"
    if spec.head_dim_qk != spec.head_dim_v or spec.head_dim_v not in HEAD_DIMS:
        return f"its head_dim is one of {', '.join(map(str, HEAD_DIMS))}"
    if not (isinstance(spec.scale, float) and spec.scale > 0):
        return "it takes the maximum of a row before the scale, which must be positive"
    return None


def hopper(spec: Spec, name: str) -> HopperPlan:
    """The kernel of a block, its numbers and the boxes of its tensor maps."""
    dim = spec.head_dim_v
    consumers, stages = _shape(dim)
    ptx_values = dim not in (64, 128)
    v_width = 128 if ptx_values else dim
    pieces, _, dims = head_dim_pieces(dim, dim)
    qk_width = sum(piece.extent for piece in pieces)
    assert isinstance(spec.scale, float)
    consumer_registers, producer_registers = REGISTERS[consumers]
    itemsize = ITEMSIZE[spec.dtype]
    constants = {
        "SCALE_LOG2": spec.scale * LOG2_E,
        "GROUP": spec.group,
        **dims,
        "QK_WIDTH": qk_width,
        "V_WIDTH": v_width,
        "V_BYTES": BLOCK_KV * v_width * itemsize,
        "SEARCH": SEARCH,
        "ALIGNMENT": 16 // itemsize,
        "CONSUMERS": consumers,
        "BLOCK_Q": CONSUMER_ROWS * consumers,
        "BLOCK_KV": BLOCK_KV,
        "STAGES": stages,
        "CONSUMER_REGISTERS": consumer_registers,
        "PRODUCER_REGISTERS": producer_registers,
    }
    boxes: dict[str, tuple[int, ...]] = {}
    for piece in pieces:
        boxes[f"q_map{piece.suffix}"] = (CONSUMER_ROWS, 1, piece.extent)
        boxes[f"k_map{piece.suffix}"] = (BLOCK_KV, 1, piece.extent)
    boxes["v_map"] = (1, 1, BLOCK_KV, 1, v_width)
    integers = (*INTEGERS, "stride_out_token", "stride_out_head")
    integers += ("stride_lse_head", "stride_lse_token") if spec.lse else ()
    arguments = (
        *(Argument(box, "map", "data") for box in boxes),
        *(Argument(tensor, "pointer", "index") for tensor in ("cu_seqlens_q", "cu_seqlens_k")),
        Argument("out", "pointer", "data", varies=False),
        *((Argument("out_lse", "pointer", "fp32"),) if spec.lse else ()),
        *(Argument(integer, "integer", "int32") for integer in integers),
        *(Argument(constant, "constant", "") for constant in constants),
    )
    kernel = HopperKernel(
        name=name,
        template=TEMPLATE,
        arguments=arguments,
        qk_pieces=tuple(
            QkPiece(piece.suffix, piece.size, piece.start, number > 0) for number, piece in enumerate(pieces)
        ),
        ptx_values=ptx_values,
        consumer_count=consumers,
        lse=spec.lse,
    )
    rows, columns = CONSUMER_ROWS * consumers, stages * BLOCK_KV
    shared_bytes = itemsize * (rows * qk_width + columns * (qk_width + v_width)) + 1024
    return HopperPlan(kernel, constants, boxes, num_warps=4, shared_bytes=shared_bytes)


def _shape(dim: int) -> tuple[int, int]:
    """Consumers and stages. Three consumers share the registers as long as the result leaves enough of them."""
    if dim <= 72:
        return 3, 3
    return (2, 3) if dim < 128 else (2, 2)
