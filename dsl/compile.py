"""Compile: what the kernels of a module become on a chip, told without that chip.

Everything that differs between the versions of Triton on this path stands here.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dsl.architecture import Architecture
from dsl.load import load
from dsl.plan.module import BlockPlan, Config, DecodeHopperPlan, KernelPlan, ModulePlan
from dsl.plan.prefill_hopper import ARCHITECTURE as HOPPER
from dsl.plan.prefill_hopper import MERGED_SPLITS
from dsl.spec import ITEMSIZE

# Triton's words for what stands in memory.
TYPES: Mapping[str, str] = MappingProxyType(
    {
        "bf16": "bf16",
        "fp16": "fp16",
        "fp32": "fp32",
        "fp8_e4m3": "fp8e4nv",
        "fp8_e4m3fnuz": "fp8e4b8",
        "fp8_e5m2": "fp8e5",
        "int8": "i8",
        "int32": "i32",
        "int64": "i64",
        "bool": "i1",
        "index": "i32",
    }
)


class CompileError(Exception):
    """Triton, or the assembler below it, refused the kernel."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One way in which a module launches one of its kernels.

    `variant` names the block and what sets this launch apart; `planned_shared_bytes` is the plan's upper bound, None
    where the plan gives none; `aligned` tells whether all pointers are multiples of 16 bytes.
    """

    kernel: KernelPlan
    variant: str
    types: Mapping[str, str]
    constants: Mapping[str, object]
    aligned: bool
    options: Mapping[str, object]
    planned_shared_bytes: int | None


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel as one chip runs it. `spill_bytes` is what a thread keeps in memory for want of registers."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    code: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """What became of one launch."""

    launch: Launch
    architecture: Architecture
    compiled: Compiled

    @property
    def fits(self) -> bool:
        return self.compiled.shared_bytes <= self.architecture.shared_bytes

    @property
    def within_plan(self) -> bool:
        planned = self.launch.planned_shared_bytes
        return planned is None or self.compiled.shared_bytes <= planned


def compile_module(
    plan: ModulePlan, path: str | Path, architecture: Architecture, *, all_variants: bool = False
) -> list[CompiledKernel]:
    """Compile what the module at `path` launches on a chip, block by block. Raises LoadError or CompileError.

    Blocks that the plan refuses on that chip are left out. `all_variants` adds the kernels for tensors that are not
    aligned and for caches that need 64-bit addresses.
    """
    module = load(path)
    result = []
    for launch in launches(plan, architecture, all_variants):
        function = getattr(module, launch.kernel.name)
        pointers = [argument.name for argument in launch.kernel.arguments if argument.kind == "pointer"]
        known = [name for name in pointers if name not in launch.kernel.unspecialized_pointers]
        try:
            compiled = compile_function(
                function,
                launch.types,
                launch.constants,
                known if launch.aligned else (),
                architecture,
                {**launch.options, "enable_fp_fusion": True},
            )
        except CompileError as error:
            raise CompileError(f"{launch.kernel.name}, {launch.variant}, {architecture.name}: {error}") from error
        result.append(CompiledKernel(launch, architecture, compiled))
    return result


def launches(plan: ModulePlan, architecture: Architecture, all_variants: bool = False) -> Iterator[Launch]:
    for block in plan.blocks:
        config = block.config(architecture.name)
        if config is None:
            continue
        types = _types(block, block.kernel)
        for variant, chosen in _choices(block, all_variants):
            aligned = chosen["ALIGNMENT"] != 1
            used = config if aligned else block.configs.get("unaligned", config)
            constants = {**block.constants, **used.constants, **chosen}
            yield Launch(block.kernel, variant, types, constants, aligned, _options(used), used.shared_bytes)
            if aligned and (low := block.configs.get("low")):
                constants, options = {**constants, **low.constants}, _options(low)
                yield Launch(block.kernel, f"{variant} low", types, constants, True, options, low.shared_bytes)
        if bounds := block.expressions.bounds:
            # The options of a launch that gives none: the launcher's own.
            constants = {"BLOCK": config.constants["BLOCK_KV"]}
            yield Launch(bounds, f"{block.spec.name} bounds", _types(block, bounds), constants, True, {}, None)
        if merge := block.merge:
            types, options = _types(block, merge.kernel), {"num_warps": merge.num_warps}
            yield Launch(merge.kernel, block.spec.name, types, merge.constants, True, options, None)
        if (hopper := block.hopper) and architecture.name == HOPPER:
            types = {**_types(block, hopper.kernel), **_map_types(block, hopper.kernel, hopper.boxes)}
            options = {"num_warps": hopper.num_warps}
            variant = f"{block.spec.name} hopper"
            yield Launch(hopper.kernel, variant, types, hopper.constants, True, options, hopper.shared_bytes)
            merge, options = hopper.merge, {"num_warps": hopper.merge.num_warps}
            for splits in MERGED_SPLITS if all_variants else MERGED_SPLITS[:1]:
                constants = {**merge.constants, "SPLITS": splits}
                variant = f"{block.spec.name} {splits} splits"
                yield Launch(merge.kernel, variant, _types(block, merge.kernel), constants, True, options, None)
        if (paged := block.decode_hopper) and architecture.name == HOPPER:
            yield from _decode_hopper_launches(block, paged, all_variants)


def _options(config: Config) -> dict[str, object]:
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}


def _decode_hopper_launches(block: BlockPlan, paged: DecodeHopperPlan, all_variants: bool) -> Iterator[Launch]:
    """What a decode launches on Hopper."""
    name, balanced = block.spec.name, "BALANCED" in paged.kernel.constants
    types = {**_types(block, paged.kernel), **_map_types(block, paged.kernel, paged.boxes)}
    for stages in paged.stages if all_variants else paged.stages[:1]:
        for chosen in ({"BALANCED": True}, {"BALANCED": False}) if balanced else ({},):
            constants = {**paged.constants, "STAGES": stages, **chosen}
            variant = f"{name} hopper, {stages} stages" + (", balanced" if chosen.get("BALANCED") else "")
            yield Launch(paged.kernel, variant, types, constants, True, {"num_warps": 1}, paged.shared_bytes(stages))
    if merge := paged.merge:
        for parts, warps in paged.merge_shapes.values():
            for chosen in (True, False) if balanced else (False,):
                constants = {**paged.merge_constants, "PARTS": parts, "BALANCED": chosen}
                options = {"num_warps": warps, "launch_pdl": True}
                variant = f"{name} merge, {parts} parts" + (", balanced" if chosen else "")
                yield Launch(merge, variant, _types(block, merge), constants, True, options, None)
    if registers := paged.registers:
        for tokens, warps in registers.shapes.values():
            constants = {**registers.constants, "TOKENS": tokens, "WARPS": warps}
            variant = f"{name} registers, {warps} warps of {tokens}"
            types, options = _types(block, registers.kernel), {"num_warps": warps}
            yield Launch(registers.kernel, variant, types, constants, True, options, None)


def _types(block: BlockPlan, kernel: KernelPlan) -> dict[str, str]:
    """Triton's word for the type of each argument that is no constant."""
    words = {**TYPES, "data": TYPES[block.spec.dtype], "cache": TYPES[block.spec.kv_dtype]}
    return {
        argument.name: "*" * (argument.kind == "pointer") + words[argument.dtype]
        for argument in kernel.arguments
        if argument.kind in ("pointer", "integer")
    }


def _map_types(block: BlockPlan, kernel: KernelPlan, boxes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Triton's word for the type of each tensor map of a kernel."""
    from triton.experimental.gluon import language as gl

    names = [argument.name for argument in kernel.arguments if argument.kind == "map"]
    word, words = TYPES[block.spec.dtype], {}
    for name in names:
        box = list(boxes[name])
        # As TMA swizzles rows of up to 128 bytes; rows of 16 bytes it leaves as they are.
        row = min(128, 2 * box[-1])
        layout: Any = gl.NVMMASharedLayout(row if row > 16 else 0, 16, rank=len(box))
        words[name] = f"tensordesc<{word}{box},{layout!r}>"
    return words


def _choices(block: BlockPlan, all_variants: bool) -> Iterator[tuple[str, dict[str, object]]]:
    """The constants that a launcher chooses by looking at its tensors, the fast choice first."""
    import triton.language as tl

    choices: dict[str, tuple[tuple[str, object], ...]] = {
        "ALIGNMENT": (("", 16 // ITEMSIZE[block.spec.kv_dtype]), (" unaligned", 1))
    }
    if "INDEX" in block.kernel.constants:
        choices["INDEX"] = (("", tl.int32), (" 64-bit", tl.int64))
    for values in product(*(options if all_variants else options[:1] for options in choices.values())):
        variant = block.spec.name + "".join(label for label, _ in values)
        yield variant, {name: value for name, (_, value) in zip(choices, values, strict=True)}


def compile_function(
    function: Any,
    types: Mapping[str, str],
    constants: Mapping[str, object],
    aligned: Collection[str],
    architecture: Architecture,
    options: Mapping[str, object],
) -> Compiled:
    """Compile one `@triton.jit` function. Raises CompileError.

    `types` maps every argument that is no constant to Triton's word (`*bf16`, `i32`); `aligned` names those whose
    pointers or values are multiples of 16; `options` are options of a launch, such as `num_warps`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    if not isinstance(function, triton.JITFunction):
        raise CompileError("no kernel, or imported under Triton's interpreter")
    arguments = function.arg_names
    if unknown := [argument for argument in arguments if argument not in types and argument not in constants]:
        raise CompileError(f"neither type nor value is known for {', '.join(unknown)}")
    make_source: Any = GluonASTSource if function.is_gluon() else ASTSource
    source = make_source(
        function,
        {argument: types.get(argument, "constexpr") for argument in arguments},
        {argument: constants[argument] for argument in arguments if argument not in types},
        {(arguments.index(argument),): [["tt.divisibility", 16]] for argument in aligned},
    )
    chip = architecture.name if architecture.is_amd else int(architecture.name.removeprefix("sm"))
    target = GPUTarget(architecture.backend, chip, architecture.warp_size)
    try:
        kernel = triton.compile(source, target=target, options=dict(options))
    except Exception as error:
        raise CompileError(f"{type(error).__name__}: {error}") from error
    shared_bytes = kernel.metadata.shared
    if architecture.is_amd:
        assembly = kernel.asm["amdgcn"]
        registers, spill_bytes = (_number(assembly, key) for key in ("vgpr_count", "private_segment_fixed_size"))
        return Compiled(registers, spill_bytes, shared_bytes, assembly)
    return Compiled(*_cubin_usage(kernel.asm["cubin"]), shared_bytes, kernel.asm["ptx"])


def _number(assembly: str, key: str) -> int:
    """A number from the metadata at the end of a GCN listing."""
    found = re.search(rf"^\s*\.{key}:\s*(\d+)", assembly, re.MULTILINE)
    if found is None:
        raise CompileError(f"the assembly does not tell its {key}")
    return int(found[1])


def _cubin_usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and its stack in bytes: a kernel of Triton calls nothing, so all of it is spilt values."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__path__[0]) / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        run = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", run.stdout)
    if found is None:
        raise CompileError(f"cuobjdump tells no registers: {run.stderr.strip()}")
    return int(found[1]), int(found[2])
