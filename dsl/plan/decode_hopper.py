"""The Hopper kernels for `single x paged`: the blocks that they run, what their templates print, and their tiles."""

from __future__ import annotations

from dataclasses import dataclass

from dsl.layout import offset, stride_name
from dsl.plan.boxes import PageBox, box_slots, padded_dim, page_box, reason_against_boxes
from dsl.plan.module import Argument, DecodeHopperPlan, KernelPlan, RegistersPlan
from dsl.plan.shaping import fields_of_expressions, has_expressions
from dsl.plan.tiles import LOG2_E
from dsl.plan.tuned import decode_work
from dsl.spec import Axis, Layout, Spec

TEMPLATE = "kernels/decode_hopper.py.jinja"
REGISTERS_TEMPLATE = "kernels/decode_registers.py.jinja"
MERGE_TEMPLATE = "kernels/decode_hopper_merge.py.jinja"
ARCHITECTURE = "sm90"
LARGEST_HEAD_DIM = 256
ROWS = 16
"""Query heads of one product."""
ALIGNMENT = 8
"""Elements of 16 bytes."""
EARLY_DIMS = 256
"""Dims of a key and a value together up to which registers have room for a tile of both."""
RESIDENT = {(True, 16): 10, (True, 32): 7, (False, 16): 4}
"""Programs that a processor has room for, by whether values leave the ring early, and by the keys of a tile."""
SMALL_BYTES = 1024
"""Barriers, and what aligns tiles."""
SEQS = 128
"""Sequences whose lengths one warp reads at once, where keys are shared out evenly."""
LEAST_TILES = 4
"""Tiles that are worth a program, where keys are shared out evenly."""
MERGED_ELEMENTS = 8192
"""Elements that a merge of many parts reads at once."""
REGISTERS_DIMS = (64, 128, 256)
STAGES = (1, 2, 3, 4)
LATE_STAGES = (3, 4)
"""Where values leave the ring late: fewer stages spill."""
OUTER = ("stride_q_seq", "stride_q_head", "stride_out_seq", "stride_out_head")
LENGTHS = ("num_seqs", "table_width", "stride_seq_lens")
INDEX = ("table_width", "stride_table_seq", "stride_table_page", "stride_seq_lens")


@dataclass(frozen=True, slots=True)
class Box:
    """One box of a tile: the name of its page in the kernel."""

    number: int
    page: str


@dataclass(frozen=True, slots=True)
class DecodeHopperKernel(KernelPlan):
    k: PageBox
    v: PageBox
    boxes: tuple[Box, ...]
    values_early: bool
    split: str
    lse: bool

    @property
    def uses_slot(self) -> bool:
        """Some box begins at another slot than the first of its page."""
        return any("slot" in coordinate for coordinate in (*self.k.coordinates, *self.v.coordinates))

    @property
    def one_box(self) -> bool:
        """A tile lies in one page."""
        return len(self.boxes) == 1

    @property
    def values_late(self) -> bool:
        """Values leave the ring after the softmax: registers have no room for them before."""
        return not self.values_early

    @property
    def outer_strides(self) -> tuple[str, ...]:
        return OUTER

    @property
    def attend_integers(self) -> tuple[str, ...]:
        """What attending to one sequence takes: all but what lengths are read by."""
        return tuple(name for name in self.runtime_integers if name not in LENGTHS)

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

    @property
    def grid(self) -> str:
        """What a program is, for the docstring."""
        return {
            "auto": "Grid: (programs,) where BALANCED, else (sequences * KV_HEADS,).",
            "fixed": "Grid: (sequences * KV_HEADS, parts of SPLIT_KEYS keys).",
            "none": "Grid: (sequences * KV_HEADS,).",
        }[self.split]


@dataclass(frozen=True, slots=True)
class RegistersKernel(KernelPlan):
    """`k_head`, `k_slot` and `k_dim` are printed offsets within a page, from `kv_head`, `slot` and `dims`; so for V."""

    k_head: str
    k_slot: str
    k_dim: str
    v_head: str
    v_slot: str
    v_dim: str
    values_by_dim: bool
    strides: tuple[str, ...]
    lse: bool

    @property
    def values_layout(self) -> str:
        return "_values_by_dim_layout" if self.values_by_dim else "_values_by_slot_layout"

    @property
    def values_dim_axis(self) -> int:
        return 2 if self.values_by_dim else 1

    @property
    def values_dims_layout(self) -> str:
        """The printed layout of the dims of values, alone."""
        inner = "gl.SliceLayout(1, V_LAYOUT)" if self.values_by_dim else "gl.SliceLayout(2, V_LAYOUT)"
        return f"gl.SliceLayout(0, {inner})"


@dataclass(frozen=True, slots=True)
class DecodeMergeKernel(KernelPlan):
    lse: bool


def reason_against(spec: Spec) -> str | None:
    """Why the Hopper kernels do not run a block, None where they do."""
    if spec.targets is not None and "hopper" not in spec.targets:
        return "`targets` leaves it out"
    if spec.dtype == "fp32":
        return "it computes in bf16 and fp16"
    if max(spec.head_dim_qk, spec.head_dim_v) > LARGEST_HEAD_DIM:
        return f"its head_dim is at most {LARGEST_HEAD_DIM}"
    if spec.group > ROWS:
        return f"at most {ROWS} query heads share a KV head"
    if has_expressions(spec):
        return f"it knows no {', '.join(fields_of_expressions(spec))}"
    assert spec.block is not None
    tile = _tile(spec)
    for tensor, layout, dim in (
        ("k_cache", spec.k_layout, spec.head_dim_qk),
        ("v_cache", spec.v_layout, spec.head_dim_v),
    ):
        reason = reason_against_boxes(tensor, layout, spec.block, dim, tile)
        if reason:
            return reason
    return None


def _tile(spec: Spec) -> int:
    """Keys of a tile: more than the rows of one product only where TMA would read runs of 32 bytes otherwise."""
    assert spec.block is not None
    runs = any(layout[-1] == Axis("slot") for layout in (spec.k_layout, spec.v_layout))
    wide = max(spec.head_dim_qk, spec.head_dim_v) > 128
    return 32 if runs and spec.block % 32 == 0 and not wide else 16


def hopper(spec: Spec, name: str) -> DecodeHopperPlan:
    """The kernels of a block, their numbers and the boxes of their tensor maps."""
    assert spec.block is not None and isinstance(spec.scale, float)
    tile = _tile(spec)
    slots = box_slots(spec.block, tile)
    boxes = tile // slots
    k = page_box("k", "k_cache", spec.k_layout, spec.block, spec.head_dim_qk, tile)
    v = page_box("v", "v_cache", spec.v_layout, spec.block, spec.head_dim_v, tile)
    constants: dict[str, int | float] = {
        "SCALE_LOG2": spec.scale * LOG2_E,
        "KV_HEADS": spec.kv_heads,
        "GROUP": spec.group,
        "HEAD_DIM_QK": spec.head_dim_qk,
        "HEAD_DIM_V": spec.head_dim_v,
        "QK_PADDED": padded_dim(spec.head_dim_qk),
        "V_PADDED": padded_dim(spec.head_dim_v),
        "K_ROW": k.row_elements,
        "V_ROW": v.row_elements,
        "BLOCK": spec.block,
        "TILE": tile,
        "BOX": slots,
        "BOXES": boxes,
        "ALIGNMENT": ALIGNMENT,
    }
    if spec.split.kind == "auto":
        constants |= {"SEQS": SEQS, "LEAST_TILES": LEAST_TILES}
    if spec.split.kind == "fixed":
        assert spec.split.keys is not None
        constants["SPLIT_KEYS"] = spec.split.keys
    split_out = ("split_out", "split_lse") if spec.split.kind != "none" else ()
    integers = (*(("num_seqs",) if spec.split.kind == "auto" else ()), *INDEX, *OUTER)
    integers += ("stride_lse_seq", "stride_lse_head") if spec.lse else ()
    arguments = (
        *(Argument(box.map, "map", "data") for box in (k, v)),
        Argument("query", "pointer", "data", varies=False),
        *(Argument(tensor, "pointer", "index") for tensor in ("block_tables", "seq_lens")),
        Argument("out", "pointer", "data", varies=False),
        *((Argument("out_lse", "pointer", "fp32"),) if spec.lse else ()),
        *(Argument(tensor, "pointer", "fp32", varies=False) for tensor in split_out),
        *(Argument(integer, "integer", "int32") for integer in integers),
        *(Argument(constant, "constant", "") for constant in (*constants, "STAGES")),
        *((Argument("BALANCED", "constant", ""),) if spec.split.kind == "auto" else ()),
    )
    early = padded_dim(spec.head_dim_qk) + padded_dim(spec.head_dim_v) <= EARLY_DIMS
    kernel = DecodeHopperKernel(
        name=name,
        template=TEMPLATE,
        arguments=arguments,
        k=k,
        v=v,
        boxes=tuple(Box(number, "next_page" + (f"_{number}" if boxes > 1 else "")) for number in range(boxes)),
        values_early=early,
        split=spec.split.kind,
        lse=spec.lse,
    )
    tile_bytes = 2 * tile * (padded_dim(spec.head_dim_qk) + padded_dim(spec.head_dim_v))
    merge, merge_constants = (None, {}) if spec.split.kind == "none" else _merge(spec, tile)
    return DecodeHopperPlan(
        kernel=kernel,
        constants=constants,
        maps={box.map: (box.tensor, box.axes, box.box, box.dense) for box in (k, v)},
        tile_bytes=tile_bytes,
        small_bytes=SMALL_BYTES,
        stages=STAGES if early else LATE_STAGES,
        resident=RESIDENT[early, tile],
        merge=merge,
        merge_constants=merge_constants,
        merge_shapes=_merge_shapes(spec),
        registers=_registers(spec),
        work=decode_work(ARCHITECTURE),
    )


def _merge(spec: Spec, tile: int) -> tuple[DecodeMergeKernel, dict[str, int]]:
    """The kernel that merges the parts of a row, and its numbers."""
    constants = {
        "KV_HEADS": spec.kv_heads,
        "GROUP": spec.group,
        "HEAD_DIM_V": spec.head_dim_v,
        "V_PADDED": padded_dim(spec.head_dim_v),
        "BLOCK": spec.block or 0,
        "TILE": tile,
        "ALIGNMENT": ALIGNMENT,
        "SEQS": SEQS,
        "LEAST_TILES": LEAST_TILES,
    }
    integers = ("num_programs", "part_keys", "num_seqs", "table_width", "stride_seq_lens", *OUTER[2:])
    integers += ("stride_lse_seq", "stride_lse_head") if spec.lse else ()
    arguments = (
        *(Argument(tensor, "pointer", "fp32", varies=False) for tensor in ("split_out", "split_lse")),
        Argument("seq_lens", "pointer", "index"),
        Argument("out", "pointer", "data", varies=False),
        *((Argument("out_lse", "pointer", "fp32"),) if spec.lse else ()),
        *(Argument(integer, "integer", "int32") for integer in integers),
        *(Argument(constant, "constant", "") for constant in (*constants, "PARTS", "BALANCED")),
    )
    kernel = DecodeMergeKernel(
        name="_decode_hopper_merge_kernel", template=MERGE_TEMPLATE, arguments=arguments, lse=spec.lse
    )
    return kernel, constants


def _merge_shapes(spec: Spec) -> dict[str, tuple[int, int]]:
    """(PARTS, warps) of a merge: one warp for few parts; fixed parts come in fixed sums, whatever the batch."""
    if spec.split.kind != "auto":
        return {"fixed": (8, 1)} if spec.split.kind == "fixed" else {}
    return {"few": (4, 1), "many": (MERGED_ELEMENTS // padded_dim(spec.head_dim_v), 4)}


def _registers(spec: Spec) -> RegistersPlan | None:
    """The kernel for short contexts, where dims and runs of slots are powers of two; for `split = auto`."""
    dim, block = spec.head_dim_qk, spec.block
    assert block is not None and isinstance(spec.scale, float)
    if spec.split.kind != "auto" or spec.head_dim_v != dim or dim not in REGISTERS_DIMS or block % 8 != 0:
        return None
    if not _contiguous_dims(spec.k_layout):
        return None
    by_dim = _contiguous_dims(spec.v_layout)
    last = spec.v_layout[-1]
    if not by_dim and (last.name != "slot" or (last.part == "inner" and last.factor % 8 != 0)):
        return None
    constants: dict[str, int | float] = {
        "SCALE_LOG2": spec.scale * LOG2_E,
        "KV_HEADS": spec.kv_heads,
        "GROUP": spec.group,
        "ROWS": 8 if spec.group <= 8 else ROWS,
        "HEAD_DIM": dim,
        "BLOCK": block,
        "ALIGNMENT": ALIGNMENT,
    }
    dense: dict[str, tuple[tuple[int, int], ...]] = {}
    offsets: dict[str, str] = {}
    for letter, layout in (("k", spec.k_layout), ("v", spec.v_layout)):
        known = _dense_strides(layout, block, dim)
        dense[f"{letter}_cache"] = tuple((layout.index(axis), stride) for axis, stride in known.items())
        words = {stride_name(letter, axis): str(stride) for axis, stride in known.items()}
        for axis, name in (("kv_head", "kv_head.to(gl.int64)"), ("slot", "slot"), ("dim", "dims")):
            offsets[f"{letter}_{axis}"] = _with_numbers(offset(letter, layout, axis, name), words) or "0"
    strides = registers_strides(spec)
    integers = (*INDEX, *strides, *(("stride_lse_seq", "stride_lse_head") if spec.lse else ()))
    arguments = (
        *(Argument(tensor, "pointer", "data", varies=False) for tensor in ("query", "k_cache", "v_cache")),
        *(Argument(tensor, "pointer", "index") for tensor in ("block_tables", "seq_lens")),
        Argument("out", "pointer", "data", varies=False),
        *((Argument("out_lse", "pointer", "fp32"),) if spec.lse else ()),
        *(Argument(tensor, "pointer", "fp32", varies=False) for tensor in ("split_out", "split_lse")),
        *(Argument(integer, "integer", "int32") for integer in integers),
        *(Argument(constant, "constant", "") for constant in (*constants, "TOKENS", "WARPS")),
    )
    kernel = RegistersKernel(
        name="_decode_registers_kernel",
        template=REGISTERS_TEMPLATE,
        arguments=arguments,
        k_head=offsets["k_kv_head"],
        k_slot=offsets["k_slot"],
        k_dim=offsets["k_dim"],
        v_head=offsets["v_kv_head"],
        v_slot=offsets["v_slot"],
        v_dim=offsets["v_dim"],
        values_by_dim=by_dim,
        strides=strides,
        lse=spec.lse,
    )
    return RegistersPlan(kernel, constants, dense, _shapes(dim))


def registers_strides(spec: Spec) -> tuple[str, ...]:
    """The strides that the kernel for short contexts takes: those that it does not know."""
    assert spec.block is not None
    layouts = (("k", spec.k_layout, spec.head_dim_qk), ("v", spec.v_layout, spec.head_dim_v))
    return (
        *OUTER,
        *(
            stride_name(letter, axis)
            for letter, layout, dim in layouts
            for axis in layout[:-1]
            if axis not in _dense_strides(layout, spec.block, dim)
        ),
    )


def _shapes(dim: int) -> dict[str, tuple[int, int]]:
    """(TOKENS, WARPS) of the kernel for short contexts: a part for few heads, for 64 keys, and the largest."""
    return {"few": (16, 2), "short": (16, 4), "long": (32, 4) if dim <= 128 else (16, 8)}


def _contiguous_dims(layout: Layout) -> bool:
    """Whether 16 bytes of a row lie together."""
    last = layout[-1]
    return last.name == "dim" and (last.part == "whole" or last.factor % 8 == 0)


def _dense_strides(layout: Layout, block: int, dim: int) -> dict[Axis, int]:
    """The strides of the axes of slots and dims after which no other axis comes, in a page without gaps."""
    strides: dict[Axis, int] = {}
    stride = 1
    for axis in reversed(layout):
        if axis.name not in ("slot", "dim"):
            break
        strides[axis] = stride
        whole = {"slot": block, "dim": dim}[axis.name]
        stride *= {"whole": whole, "outer": whole // axis.factor, "inner": axis.factor}[axis.part]
    return {axis: strides[axis] for axis in strides if axis != layout[-1]}


def _with_numbers(expression: str, numbers: dict[str, str]) -> str:
    """A printed offset with numbers in place of strides that are known."""
    return " ".join(numbers.get(word, word) for word in expression.split(" "))
