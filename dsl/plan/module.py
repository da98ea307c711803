"""The plan of one generated module: what `render` prints, flat and concrete.

A *kernel* is text shared by every block that would print the same; a *launch* is the host side shared by the blocks of
one family, layout and set of outputs; a *block* is one attention block: its numbers, its kernel and its launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dsl.plan.params import HostParam
from dsl.plan.tuned import DecodeWork, WorkTimes
from dsl.spec import Spec, SpecFile

Number = int | float


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a kernel.

    `kind` is `pointer`, `map` (a tensor map, as TMA reads it), `integer` or `constant`. A pointer's dtype is a word of
    the language, or `data` and `cache` for the block's own, or `index` for int32 or int64; `varies` says
    that its alignment is the caller's choice.
    """

    name: str
    kind: str
    dtype: str
    varies: bool = True


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """One kernel text. Subclasses add what their template reads; equality is equality of the text."""

    name: str = field(compare=False)
    template: str
    arguments: tuple[Argument, ...]

    @property
    def runtime_integers(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.arguments if argument.kind == "integer")

    @property
    def constants(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.arguments if argument.kind == "constant")

    @property
    def unspecialized_pointers(self) -> tuple[str, ...]:
        """Pointers whose alignment Triton must not look at: the kernel says itself what it may assume."""
        return tuple(argument.name for argument in self.arguments if argument.kind == "pointer" and argument.varies)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """One host side. Subclasses add what their template reads; equality is equality of the text."""

    name: str = field(compare=False)
    family: str
    template: str
    arguments: tuple[str, ...]
    lse: bool
    params: tuple[HostParam, ...] = field(default=(), kw_only=True)
    has_expressions: bool = field(default=False, kw_only=True)
    may_miss: bool = field(default=False, kw_only=True)

    @property
    def param_list(self) -> str:
        """The printed params behind the tensors of a helper's arguments."""
        return "".join(f", {param.local}" for param in self.params)

    @property
    def param_arguments(self) -> tuple[tuple[str, str], ...]:
        """What kernels get for params: (argument, printed value)."""
        return tuple(argument for param in self.params for argument in param.arguments)

    @property
    def ignored(self) -> str:
        """The printed params of a function that chooses by tensors alone."""
        return ", *_" if self.params else ""

    @property
    def skips_empty(self) -> bool:
        """Whether the reference passes over sequences without keys, whose rows stay as they are."""
        return not self.has_expressions

    @property
    def call_names(self) -> tuple[str, ...]:
        """What the public function hands to the launch, in order."""
        return (*self.arguments, *(param.name for param in self.params))

    @property
    def result_names(self) -> tuple[str, ...]:
        return ("out", "out_lse") if self.lse else ("out",)

    @property
    def entry_names(self) -> tuple[str, ...]:
        """What kernels call the tensors of a call, and its results."""
        return (*self.arguments, *(param.local for param in self.params), *self.result_names)

    @property
    def results(self) -> str:
        return ", ".join(self.result_names)

    @property
    def results_tuple(self) -> str:
        return "(out, out_lse)" if self.lse else "(out,)"

    @property
    def result_strings(self) -> str:
        """The printed tuple of the results' names."""
        return '("out", "out_lse")' if self.lse else '("out",)'

    @property
    def keywords(self) -> str:
        return f"{self.results}, workspace, check"

    @property
    def returns(self) -> str:
        return "tuple[torch.Tensor, torch.Tensor]" if self.lse else "torch.Tensor"


@dataclass(frozen=True, slots=True)
class Config:
    """The tile sizes and launch options of one kernel on one architecture, and the shared memory they need at most."""

    constants: Mapping[str, int]
    num_warps: int
    num_stages: int
    shared_bytes: int = field(compare=False)

    @property
    def entries(self) -> Mapping[str, int]:
        return {**self.constants, "num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True, slots=True)
class MergePlan:
    """The kernel that merges a block's splits, and its numbers."""

    kernel: KernelPlan
    constants: Mapping[str, int]
    num_warps: int

    @property
    def entries(self) -> Mapping[str, int]:
        return {**self.constants, "num_warps": self.num_warps}


@dataclass(frozen=True, slots=True)
class HopperPlan:
    """The kernel that a block runs on Hopper: its numbers, and the box that each of its tensor maps reads."""

    kernel: KernelPlan
    constants: Mapping[str, Number]
    boxes: Mapping[str, tuple[int, ...]]
    num_warps: int
    shared_bytes: int = field(compare=False)
    merge: MergePlan
    merged_splits: tuple[int, ...]
    times: WorkTimes

    @property
    def entries(self) -> Mapping[str, Number]:
        return {**self.constants, "num_warps": self.num_warps}


@dataclass(frozen=True, slots=True)
class RegistersPlan:
    """The kernel for short contexts that a block runs on Hopper, and its numbers.

    `dense` gives, for each cache, axes whose strides the kernel takes for granted; `shapes` the tokens of a warp and
    the warps of a program for each kind of batch.
    """

    kernel: KernelPlan
    constants: Mapping[str, Number]
    dense: Mapping[str, tuple[tuple[int, int], ...]]
    shapes: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class DecodeHopperPlan:
    """The kernels that a decode runs on Hopper.

    `maps` gives, for each tensor map, its tensor, its axes (an axis of the tensor, or extent and stride), its box, and
    the axes whose strides it takes for granted. A tile of keys and values has `tile_bytes`; the ring has one of so
    many `stages`, and a processor room for `resident` programs. `merge_shapes`: parts that a merge reads at once, and
    its warps.
    """

    kernel: KernelPlan
    constants: Mapping[str, Number]
    maps: Mapping[str, tuple[str, tuple[int | tuple[int, int], ...], tuple[int, ...], tuple[tuple[int, int], ...]]]
    tile_bytes: int = field(compare=False)
    small_bytes: int = field(compare=False)
    stages: tuple[int, ...]
    resident: int
    merge: KernelPlan | None
    merge_constants: Mapping[str, int]
    merge_shapes: Mapping[str, tuple[int, int]]
    registers: RegistersPlan | None
    work: DecodeWork

    @property
    def boxes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: box for name, (_, _, box, _) in self.maps.items()}

    @property
    def kernels(self) -> tuple[KernelPlan, ...]:
        others = (self.registers.kernel if self.registers else None, self.merge)
        return (self.kernel, *(kernel for kernel in others if kernel))

    def shared_bytes(self, stages: int) -> int:
        """An upper bound on the shared memory of a program."""
        return stages * self.tile_bytes + self.small_bytes


@dataclass(frozen=True, slots=True)
class ReferenceFunction:
    """One expression of a block in plain PyTorch: the field, where it was written, and the function's body."""

    field: str
    name: str
    place: str
    lines: tuple[str, ...]
    result: str


@dataclass(frozen=True, slots=True)
class ExpressionPlan:
    """What a block's expressions add to its record: functions of the reference, and the kernel of tiles' bounds.

    `most_keys` is how many keys a query sees at most, where that is known.
    """

    functions: tuple[ReferenceFunction, ...] = ()
    bounds: KernelPlan | None = None
    most_keys: int | None = None


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """One attention block: the numbers that make a kernel text its own.

    `configs` maps architectures to tiles, `default` among them for all that are not named; `unfit` maps architectures
    that cannot run the block to the bytes of shared memory that it would need there. `hopper` is the kernel that sm90
    runs in place of the portable one wherever the tensors allow it; `no_hopper` says why there is none.
    """

    spec: Spec
    kernel: KernelPlan
    launch: LaunchPlan
    merge: MergePlan | None
    hopper: HopperPlan | None
    decode_hopper: DecodeHopperPlan | None
    no_hopper: str | None
    expressions: ExpressionPlan
    constants: Mapping[str, Number]
    configs: Mapping[str, Config]
    unfit: Mapping[str, int]
    place: tuple[str, int]

    @property
    def record(self) -> str:
        """The name of the block's record in the module: no helper's name ends like it."""
        return f"_{self.spec.name}_block"

    @property
    def provenance(self) -> str:
        """Where the block stands: the spec's base name and the line."""
        return f"{self.place[0]}:{self.place[1]}"

    @property
    def is_bounded(self) -> bool:
        """Whether it is known how many keys a query sees at most."""
        return self.expressions.most_keys is not None

    @property
    def scale_text(self) -> str:
        """The printed scale: a number, or the name of a param."""
        return f'"{self.spec.scale}"' if isinstance(self.spec.scale, str) else str(self.spec.scale)

    @property
    def torch_dtype(self) -> str:
        return {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}[self.spec.dtype]

    @property
    def key(self) -> tuple[str, ...]:
        """What a dispatch chooses by, printed in the order of the launch's key."""
        spec = self.spec
        numbers = [spec.heads, spec.kv_heads, spec.head_dim_qk, spec.head_dim_v]
        if spec.block is not None:
            numbers.append(spec.block)
        return (self.torch_dtype, *map(str, numbers))

    def config(self, architecture: str) -> Config | None:
        """The tiles on an architecture, or None where the block does not fit."""
        if architecture in self.unfit:
            return None
        return self.configs.get(architecture, self.configs["default"])


@dataclass(frozen=True, slots=True)
class FunctionPlan:
    """One public function: an attention block (no `table`) or a dispatch over `blocks` (`table` is its record)."""

    name: str
    blocks: tuple[BlockPlan, ...]
    table: str | None
    title: str

    @property
    def launch(self) -> LaunchPlan:
        return self.blocks[0].launch

    @property
    def entry(self) -> str:
        """The name of the function's record in the module: no helper's name ends like it."""
        return f"_{self.name}_entry"

    @property
    def chooser(self) -> str:
        """The printed function from tensors to block."""
        return f"_choose_{self.name}" if self.table else f"lambda *tensors, **named: {self.blocks[0].record}"

    @property
    def types(self) -> Mapping[str, str]:
        """The types, in a schema, of what is passed: tensors, then params."""
        return {
            **dict.fromkeys(self.launch.arguments, "Tensor"),
            **{param.name: param.schema for param in self.launch.params},
        }


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """Everything that one generated file holds, in the order in which it is printed."""

    file: SpecFile
    stem: str
    kernels: tuple[KernelPlan, ...]
    launches: tuple[LaunchPlan, ...]
    blocks: tuple[BlockPlan, ...]
    functions: tuple[FunctionPlan, ...]

    @property
    def dispatches(self) -> tuple[FunctionPlan, ...]:
        return tuple(function for function in self.functions if function.table)

    @property
    def has_lse(self) -> bool:
        return any(launch.lse for launch in self.launches)

    @property
    def has_pages(self) -> bool:
        return any(block.spec.kv == "paged" for block in self.blocks)

    @property
    def has_packed_keys(self) -> bool:
        return any(block.spec.kv == "packed" for block in self.blocks)

    @property
    def has_hopper(self) -> bool:
        """Some block has a kernel in Gluon."""
        return self.has_prefill_hopper or self.has_decode_hopper

    @property
    def has_prefill_hopper(self) -> bool:
        return any(block.hopper for block in self.blocks)

    @property
    def has_decode_hopper(self) -> bool:
        return any(block.decode_hopper for block in self.blocks)

    @property
    def work_times(self) -> WorkTimes:
        """What Hopper kernels share out their work by."""
        return next(block.hopper.times for block in self.blocks if block.hopper)

    @property
    def decode_work(self) -> DecodeWork:
        """By what Hopper kernels of decodes share out keys."""
        return next(block.decode_hopper.work for block in self.blocks if block.decode_hopper)

    @property
    def merged_splits(self) -> tuple[int, ...]:
        """The numbers of splits that the merges of Hopper kernels are compiled for."""
        return next(block.hopper.merged_splits for block in self.blocks if block.hopper)

    @property
    def has_params(self) -> bool:
        return any(launch.params for launch in self.launches)

    @property
    def wants_grad(self) -> str:
        """The printed test of what a function is called with: numbers are among it where there are params."""
        return (
            "isinstance(tensor, torch.Tensor) and tensor.requires_grad" if self.has_params else "tensor.requires_grad"
        )

    @property
    def has_expressions(self) -> bool:
        return any(launch.has_expressions for launch in self.launches)

    @property
    def has_sink(self) -> bool:
        return any(block.spec.sink is not None for block in self.blocks)

    @property
    def may_miss(self) -> bool:
        """Some param may be read outside of it."""
        return any(launch.may_miss for launch in self.launches)

    @property
    def has_bounds(self) -> bool:
        """Some block wants the least and the greatest element of a param in each tile of keys."""
        return any(block.expressions.bounds for block in self.blocks)

    @property
    def has_most_keys(self) -> bool:
        return any(block.expressions.most_keys is not None for block in self.blocks)

    @property
    def has_ranges(self) -> bool:
        """Some kernel visits the tiles that its rows see."""
        return any(getattr(kernel, "visits_ranges", False) for kernel in self.kernels)

    @property
    def has_two_ranges(self) -> bool:
        return any(getattr(kernel, "two_ranges", False) for kernel in self.kernels)

    @property
    def reference_functions(self) -> tuple[ReferenceFunction, ...]:
        return tuple(function for block in self.blocks for function in block.expressions.functions)

    @property
    def has_alibi(self) -> bool:
        """Whether the reference of some block computes slopes."""
        return any("_alibi(" in line for function in self.reference_functions for line in function.lines)

    @property
    def function_templates(self) -> tuple[str, ...]:
        """The functions that expressions call, each once."""
        used = {name for kernel in self.kernels for name in getattr(kernel, "functions", ())}
        return tuple(f"functions/{name.removeprefix('_')}.py.jinja" for name in sorted(used))

    @property
    def has_ptx_values(self) -> bool:
        """Some Hopper kernel multiplies weights and values by PTX of its own."""
        return any(getattr(kernel, "ptx_piece", None) for kernel in self.kernels)

    @property
    def has_speculation(self) -> bool:
        """Some Hopper kernel guesses the offset of its softmax."""
        return any(getattr(kernel, "speculative", False) for kernel in self.kernels)

    @property
    def has_unaligned(self) -> bool:
        """Some block has tiles of its own for tensors that cannot be read in 16-byte loads."""
        return any("unaligned" in block.configs for block in self.blocks)

    @property
    def public_names(self) -> tuple[str, ...]:
        return tuple(function.name for function in self.functions)
