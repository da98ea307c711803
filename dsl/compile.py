"""Compile: what a kernel becomes on a chip, told without that chip: registers, spills, shared memory, code.

Everything that differs between the versions of Triton on this path stands here.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsl.architecture import Architecture


class CompileError(Exception):
    """Triton, or the assembler below it, refused the kernel."""


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One kernel as one chip would run it.

    `spill_bytes` is what one thread keeps in local memory for want of registers; `code` is PTX or GCN assembly.
    """

    name: str
    architecture: Architecture
    registers: int
    spill_bytes: int
    shared_bytes: int
    code: str = field(repr=False)

    @property
    def fits(self) -> bool:
        return self.shared_bytes <= self.architecture.shared_bytes


def compile_function(
    function: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object],
    aligned: Collection[str],
    architecture: Architecture,
    options: Mapping[str, object],
) -> CompiledKernel:
    """Compile one `@triton.jit` function. Raises CompileError.

    `signature` maps every argument that is no constexpr to Triton's word for its type (`*bf16`, `i32`); `aligned`
    names those whose pointers or values are multiples of 16; `options` are launch options such as `num_warps`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    name = function.__name__
    if not isinstance(function, triton.JITFunction):
        raise CompileError(f"{name}: not compilable: it was imported under Triton's interpreter, or is no kernel")
    arguments = function.arg_names
    unknown = [argument for argument in arguments if argument not in signature and argument not in constexprs]
    if unknown:
        raise CompileError(f"{name}: no type for {', '.join(unknown)}")
    types = {argument: signature.get(argument, "constexpr") for argument in arguments}
    divisibility = {(arguments.index(argument),): [["tt.divisibility", 16]] for argument in aligned}
    chip = architecture.name if architecture.is_amd else int(architecture.name.removeprefix("sm"))
    try:
        compiled = triton.compile(
            ASTSource(function, types, dict(constexprs), divisibility),
            target=GPUTarget(architecture.backend, chip, architecture.warp_size),
            options=dict(options),
        )
    except Exception as error:
        raise CompileError(f"{name} for {architecture.name}: {type(error).__name__}: {error}") from error
    if architecture.is_amd:
        code = compiled.asm["amdgcn"]
        registers, spill_bytes = _assembly_number(code, "vgpr_count"), _assembly_number(code, "private_segment_fixed_size")
    else:
        code = compiled.asm["ptx"]
        registers, spill_bytes = _cubin_usage(compiled.asm["cubin"])
    return CompiledKernel(name, architecture, registers, spill_bytes, compiled.metadata.shared, code)


def _assembly_number(assembly: str, key: str) -> int:
    """A number from the metadata at the end of a GCN listing."""
    found = re.search(rf"^\s*\.{key}:\s*(\d+)", assembly, re.MULTILINE)
    if found is None:
        raise CompileError(f"the assembly does not tell its {key}")
    return int(found[1])


def _cubin_usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and its stack in bytes: a Triton kernel calls nothing, so all of its stack is spilt."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__path__[0]) / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        run = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", run.stdout)
    if found is None:
        raise CompileError(f"cuobjdump does not tell the kernel's registers: {run.stderr.strip()}")
    return int(found[1]), int(found[2])
