"""The host side of a family: the shapes it expects and the strides it passes, printed from the axis lists."""

from __future__ import annotations

from dataclasses import dataclass

from dsl.layout import find, stride_arguments
from dsl.plan.decode_hopper import OUTER, registers_strides
from dsl.plan.module import LaunchPlan
from dsl.plan.params import HostParam, host_params
from dsl.plan.shaping import Shaping, has_expressions
from dsl.spec import Axis, Layout, Spec


@dataclass(frozen=True, slots=True)
class TensorShape:
    """What the launcher expects of one argument: its axes for messages, its printed extents (`None`: any)."""

    argument: str
    axes: str
    extents: tuple[str, ...]

    @property
    def expected(self) -> str:
        return f"({', '.join(self.extents)})"


@dataclass(frozen=True, slots=True)
class Stride:
    """A stride argument of the kernel and its printed value."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Logical:
    """One tensor in the reference, brought to the family's plain order of axes in PyTorch."""

    name: str
    expression: str


@dataclass(frozen=True, slots=True)
class DecodeLaunch(LaunchPlan):
    shapes: tuple[TensorShape, ...]
    strides: tuple[Stride, ...]
    logical: tuple[Logical, ...]
    in_page: str
    pages: str
    key: tuple[str, ...]
    seq_axis: int
    out_seq_axis: int
    out_head_axis: int
    out_shape: str
    query_row: str
    out_row: str
    split: str
    hopper: bool = False
    registers_strides: tuple[Stride, ...] = ()
    bounded: bool = False

    @property
    def out_seq_stride(self) -> str:
        return next(stride.value for stride in self.strides if stride.name == "stride_out_seq")

    @property
    def out_head_stride(self) -> str:
        return next(stride.value for stride in self.strides if stride.name == "stride_out_head")

    @property
    def fixed_keys(self) -> str:
        """The printed number of keys of a fixed part: 0 for parts as they fit, -1 for whole sequences."""
        return {"auto": "0", "none": "-1", "fixed": 'paged.constants["SPLIT_KEYS"]'}[self.split]

    @property
    def outer_strides(self) -> tuple[Stride, ...]:
        """The strides of the query and of the result."""
        return tuple(stride for stride in self.strides if stride.name in OUTER)

    @property
    def split_fixed(self) -> bool:
        return self.split == "fixed"

    @property
    def may_split(self) -> bool:
        return self.split != "none"

    @property
    def split_auto(self) -> bool:
        return self.split == "auto"

    @property
    def warm_splits(self) -> int:
        return 2 if self.may_split else 1

    @property
    def programs_per_processor(self) -> int:
        return 4

    @property
    def tiles_per_split(self) -> int:
        return 4

    @property
    def maximum_splits(self) -> int:
        return 64

    @property
    def documentation(self) -> tuple[str, ...]:
        return (
            *(f"{shape.argument}: {shape.axes}" for shape in self.shapes),
            "block_tables: [seq, page], the page of each run of keys; entries past a length may hold anything",
            "seq_lens: [seq], clamped to what a row of block_tables holds; 0 gives a row of zeros",
            *(param.documentation for param in self.params),
            *_result_documentation(self.lse, "seq"),
        )


@dataclass(frozen=True, slots=True)
class ScannedParam:
    """A param whose least and greatest element in each tile are found ahead: its bounds begin at `first` words."""

    name: str
    dtype: str
    first: int

    @property
    def words(self) -> int:
        return 4 if self.dtype == "int64" else 2

    @property
    def stop(self) -> int:
        return self.first + self.words

    @property
    def torch_dtype(self) -> str:
        return f"torch.{self.dtype}"


def _scanned(shaping: Shaping) -> tuple[ScannedParam, ...]:
    found: list[ScannedParam] = []
    tensors = {test.param: test.tensor for test in shaping.scan}
    for name, tensor in tensors.items():
        found.append(ScannedParam(name, tensor.dtype, found[-1].stop if found else 0))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class PrefillLaunch(LaunchPlan):
    shapes: tuple[TensorShape, ...]
    strides: tuple[Stride, ...]
    logical: tuple[Logical, ...]
    key: tuple[str, ...]
    q_axis: int
    k_axis: int
    v_axis: int
    q_head_axis: int
    k_head_axis: int
    v_head_axis: int
    out_shape: str
    hopper: bool
    scanned: tuple[ScannedParam, ...] = ()

    @property
    def scratch_argument(self) -> str:
        """The printed argument for what the bounds of tiles are written to."""
        return ", scratch" if self.scanned else ""

    @property
    def words(self) -> int:
        """How many 32-bit words the bounds of a tile take."""
        return sum(param.words for param in self.scanned)

    @property
    def out_strides(self) -> tuple[Stride, ...]:
        return tuple(stride for stride in self.strides if stride.name.startswith("stride_out"))

    @property
    def documentation(self) -> tuple[str, ...]:
        return (
            *(f"{shape.argument}: {shape.axes}" for shape in self.shapes),
            "cu_seqlens_q, cu_seqlens_k: [seq + 1], where sequences begin; rows of no sequence become zeros",
            *(param.documentation for param in self.params),
            *_result_documentation(self.lse, "q_token"),
        )


@dataclass(frozen=True, slots=True)
class PagedLaunch(LaunchPlan):
    shapes: tuple[TensorShape, ...]
    strides: tuple[Stride, ...]
    logical: tuple[Logical, ...]
    in_page: str
    pages: str
    key: tuple[str, ...]
    q_axis: int
    out_shape: str

    @property
    def documentation(self) -> tuple[str, ...]:
        return (
            *(f"{shape.argument}: {shape.axes}" for shape in self.shapes),
            "cu_seqlens_q: [seq + 1], where the query tokens of sequences begin; rows of no sequence become zeros",
            "block_tables: [seq, page], the page of each run of keys; entries past a length may hold anything",
            "seq_lens: [seq], keys of a sequence, its new tokens' among them; clamped to a row of block_tables",
            *(param.documentation for param in self.params),
            *_result_documentation(self.lse, "q_token"),
        )


def _result_documentation(lse: bool, tokens: str) -> tuple[str, ...]:
    lines = _RESULT_DOCUMENTATION
    if not lse:
        return lines
    words = f"Returns (out, out_lse); out_lse: [head, {tokens}], float32, the natural log of the softmax's denominator"
    return (*lines, words)


_RESULT_DOCUMENTATION = (
    "out: where to write the result; workspace: scratch memory; check: also check values on the device, which waits",
)

_EXTENTS = {
    "block": "None",
    "seq": "None",
    "q_token": "None",
    "kv_token": "None",
    "slot": "block.block",
    "head": "block.heads",
    "kv_head": "block.kv_heads",
}


def _shape(argument: str, layout: Layout, dim: str) -> TensorShape:
    words = {**_EXTENTS, "dim": dim}

    def extent(axis: Axis) -> str:
        whole = words[axis.name]
        return {"whole": whole, "outer": f"{whole} // {axis.factor}", "inner": str(axis.factor)}[axis.part]

    return TensorShape(argument, f"[{', '.join(map(str, layout))}]", tuple(extent(axis) for axis in layout))


def _strides(*tensors: tuple[str, str, Layout]) -> tuple[Stride, ...]:
    return tuple(
        Stride(name, f"_stride({argument}, {position}, unit)")
        for letter, argument, layout in tensors
        for name, position in stride_arguments(letter, layout)
    )


def _size(argument: str, layout: Layout, name: str) -> str:
    """The printed extent of an axis, whole or split; 1 where the layout has none."""
    return " * ".join(f"{argument}.size({layout.index(axis)})" for axis in find(layout, name)) or "1"


def _result_shape(source: str, layout: Layout, out_layout: Layout) -> str:
    words = {"dim": "block.head_dim_v", "head": "block.heads"}
    return f"({', '.join(words.get(axis.name) or _size(source, layout, axis.name) for axis in out_layout)})"


def _logical(name: str, argument: str, layout: Layout, axes: tuple[str, ...], dim: str) -> Logical:
    """`argument.permute(...).reshape(...)` with the given axes."""
    order = [layout.index(axis) for wanted in axes for axis in find(layout, wanted)]
    expression = argument
    if order != sorted(order):
        expression += f".permute({', '.join(map(str, order))})"
    if any(len(find(layout, wanted)) != 1 for wanted in axes):
        sizes = {"block": "-1", "slot": "block.block", "kv_head": "block.kv_heads", "dim": dim}
        expression += f".reshape({', '.join(sizes[axis] for axis in axes)})"
    return Logical(name, expression)


def _in_page(argument: str, layout: Layout) -> str:
    """The printed offset, in elements, of the last element of one page and head from its first."""
    axes = [str(position) for position, axis in enumerate(layout) if axis.name in ("slot", "dim")]
    return f"_span({argument}, {', '.join(axes)})"


def _row(argument: str, layout: Layout) -> str:
    """The printed rows `[head, dim]` of one sequence."""
    before = layout[: layout.index(Axis("seq")) + 1]
    row = f"{argument}[{', '.join('seq' if axis.name == 'seq' else ':' for axis in before)}]"
    return row if layout.index(Axis("head")) < layout.index(Axis("dim")) else f"{row}.T"


def decode_launch(spec: Spec, name: str, shaping: Shaping, bounded: bool, hopper: bool) -> DecodeLaunch:
    """`bounded` tells whether it is known how many keys a query sees at most, `hopper` whether any block of the module
    has Hopper kernels: all share one launch.
    """
    q, k, v, out = spec.q_layout, spec.k_layout, spec.v_layout, spec.out_layout
    cache = ("block", "slot", "kv_head", "dim")
    strides = _strides(("q", "query", q), ("out", "out", out), ("k", "k_cache", k), ("v", "v_cache", v))
    return DecodeLaunch(
        name=name,
        family="decode",
        template="parts/launch_decode.py.jinja",
        arguments=spec.arguments,
        lse=spec.lse,
        shapes=(
            _shape("query", q, "block.head_dim_qk"),
            _shape("k_cache", k, "block.head_dim_qk"),
            _shape("v_cache", v, "block.head_dim_v"),
        ),
        strides=strides,
        logical=(
            _logical("keys", "k_cache", k, cache, "block.head_dim_qk"),
            _logical("values", "v_cache", v, cache, "block.head_dim_v"),
        ),
        in_page=f"{_in_page('k_cache', k)}, {_in_page('v_cache', v)}",
        pages=f"{_size('k_cache', k, 'block')}, {_size('v_cache', v, 'block')}",
        key=(
            "query.dtype",
            _size("query", q, "head"),
            _size("k_cache", k, "kv_head"),
            _size("query", q, "dim"),
            _size("v_cache", v, "dim"),
            _size("k_cache", k, "slot"),
        ),
        seq_axis=q.index(Axis("seq")),
        out_seq_axis=out.index(Axis("seq")),
        out_head_axis=out.index(Axis("head")),
        out_shape=_result_shape("query", q, out),
        query_row=_row("query", q),
        out_row=_row("out", out),
        split=spec.split.kind,
        hopper=hopper,
        registers_strides=tuple(stride for stride in strides if stride.name in registers_strides(spec)),
        bounded=bounded,
        params=_params(spec, shaping, seq="seqs", q_token="seqs", kv_token="None"),
        has_expressions=has_expressions(spec),
    )


def _params(spec: Spec, shaping: Shaping, **extents: str) -> tuple[HostParam, ...]:
    words = {"head": "block.heads", "kv_head": "block.kv_heads", **extents}
    return host_params(spec, words, shaping.large)


def prefill_launch(spec: Spec, name: str, shaping: Shaping, hopper: bool) -> PrefillLaunch:
    """`hopper` tells whether any block of the module has a Hopper kernel: all share one launch."""
    q, k, v, out = spec.q_layout, spec.k_layout, spec.v_layout, spec.out_layout
    q_axes, kv_axes = ("q_token", "head", "dim"), ("kv_token", "kv_head", "dim")
    return PrefillLaunch(
        name=name,
        family="prefill",
        template="parts/launch_prefill.py.jinja",
        arguments=spec.arguments,
        lse=spec.lse,
        shapes=(
            _shape("q", q, "block.head_dim_qk"),
            _shape("k", k, "block.head_dim_qk"),
            _shape("v", v, "block.head_dim_v"),
        ),
        strides=_strides(("q", "q", q), ("k", "k", k), ("v", "v", v), ("out", "out", out)),
        logical=(
            _logical("queries", "q", q, q_axes, ""),
            _logical("keys", "k", k, kv_axes, ""),
            _logical("values", "v", v, kv_axes, ""),
            _logical("results", "out", out, q_axes, ""),
        ),
        key=(
            "q.dtype",
            _size("q", q, "head"),
            _size("k", k, "kv_head"),
            _size("q", q, "dim"),
            _size("v", v, "dim"),
        ),
        q_axis=q.index(Axis("q_token")),
        k_axis=k.index(Axis("kv_token")),
        v_axis=v.index(Axis("kv_token")),
        q_head_axis=q.index(Axis("head")),
        k_head_axis=k.index(Axis("kv_head")),
        v_head_axis=v.index(Axis("kv_head")),
        out_shape=_result_shape("q", q, out),
        hopper=hopper,
        scanned=_scanned(shaping),
        params=_params(
            spec,
            shaping,
            seq="cu_seqlens_q.numel() - 1",
            q_token=f"q.size({q.index(Axis('q_token'))})",
            kv_token=f"k.size({k.index(Axis('kv_token'))})",
        ),
        has_expressions=has_expressions(spec),
    )


def paged_launch(spec: Spec, name: str, shaping: Shaping) -> PagedLaunch:
    q, k, v, out = spec.q_layout, spec.k_layout, spec.v_layout, spec.out_layout
    q_axes, cache = ("q_token", "head", "dim"), ("block", "slot", "kv_head", "dim")
    q_axis = q.index(Axis("q_token"))
    return PagedLaunch(
        name=name,
        family="paged",
        template="parts/launch_paged.py.jinja",
        arguments=spec.arguments,
        lse=spec.lse,
        shapes=(
            _shape("q", q, "block.head_dim_qk"),
            _shape("k_cache", k, "block.head_dim_qk"),
            _shape("v_cache", v, "block.head_dim_v"),
        ),
        strides=_strides(("q", "q", q), ("out", "out", out), ("k", "k_cache", k), ("v", "v_cache", v)),
        logical=(
            _logical("queries", "q", q, q_axes, ""),
            _logical("results", "out", out, q_axes, ""),
            _logical("keys", "k_cache", k, cache, "block.head_dim_qk"),
            _logical("values", "v_cache", v, cache, "block.head_dim_v"),
        ),
        in_page=f"{_in_page('k_cache', k)}, {_in_page('v_cache', v)}",
        pages=f"{_size('k_cache', k, 'block')}, {_size('v_cache', v, 'block')}",
        key=(
            "q.dtype",
            _size("q", q, "head"),
            _size("k_cache", k, "kv_head"),
            _size("q", q, "dim"),
            _size("v_cache", v, "dim"),
            _size("k_cache", k, "slot"),
        ),
        q_axis=q_axis,
        out_shape=_result_shape("q", q, out),
        params=_params(spec, shaping, seq="seqs", q_token=f"q.size({q_axis})", kv_token="None"),
        has_expressions=has_expressions(spec),
    )
