"""A CUDA driver without a GPU: Triton compiles for sm90, and launches of CPU tensors are only remembered."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

SIZES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "fp32": 4, "fp64": 8}
MOST_PARAMETERS = 128


class RawLaunch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_int64),
        ("stream", ctypes.c_int64),
        ("grid", ctypes.c_int64 * 3),
        ("pdl", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("parameters", ctypes.c_uint64 * MOST_PARAMETERS),
    )


@dataclass(frozen=True)
class Launched:
    """What reached the driver. The scratch that Triton adds is left out of the parameters."""

    kernel: int
    stream: int
    grid: tuple[int, ...]
    pdl: bool
    parameters: tuple[int, ...]


@dataclass
class FakeDriver:
    """What Triton asks a driver for. `device` is the current one: -1 is the number of CPU tensors' device."""

    library: ctypes.PyDLL
    utils: Any
    nvidia: Any
    device: int = -1
    stream: int = 77
    names: list[str] = field(default_factory=list)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        sizes = [*parameter_sizes(src.signature.values()), 8, 8]
        number = self.library.fake_declare(metadata.name.encode(), len(sizes), (ctypes.c_int * len(sizes))(*sizes))
        assert number >= 0, "the fake driver has no room for the kernel"
        self.names.append(metadata.name)
        return self.nvidia.CudaLauncher(src, metadata)

    @property
    def encodings(self) -> int:
        """How many tensor maps have been encoded."""
        return ctypes.c_int.in_dll(self.library, "fake_encodings").value

    def take(self) -> list[Launched]:
        """The launches since the last time."""
        count = ctypes.c_int.in_dll(self.library, "fake_launch_count")
        launches = (RawLaunch * 64).in_dll(self.library, "fake_launches")
        taken = [
            Launched(raw.kernel, raw.stream, tuple(raw.grid), bool(raw.pdl), tuple(raw.parameters[: raw.count - 2]))
            for raw in launches[: count.value]
        ]
        assert count.value <= len(launches)
        count.value = 0
        return taken


def parameter_sizes(signature: Any) -> Iterator[int]:
    for word in signature:
        if word.startswith("tensordesc"):
            rank = re.findall(r"\[([^\]]*)\]", word)[0].count(",") + 1
            yield from (128, *(4,) * rank, *(8,) * rank)
        elif word != "constexpr":
            yield 8 if word.startswith("*") else SIZES[word]


def fake_cuda(folder: Path) -> FakeDriver:
    """Make the fake driver Triton's, for good: kernels are unloaded through it whenever they go.

    It takes the place of the real one, so it is for machines that have none.
    """
    import triton.backends.nvidia.driver as nvidia

    driver = FakeDriver(build_library(folder), None, nvidia)
    triton.runtime.driver._active = driver  # pyright: ignore[reportAttributeAccessIssue]
    triton.knobs.nvidia.libcuda_path = str(folder)
    driver.utils = nvidia.CudaUtils()
    return driver


def build_library(folder: Path) -> ctypes.PyDLL:
    """The library that Triton finds as libcuda.so.1, with a function that does nothing for each that it may look up."""
    source = Path(__file__).with_name("fake_cuda.c").read_text()
    base = Path(triton.__file__).parent / "backends" / "nvidia"
    text = "".join((base / file).read_text() for file in ("driver.c", "driver.py"))
    known = set(re.findall(r"\bCUDAAPI (cu\w+)\(", (base / "include" / "cuda.h").read_text()))
    missing = sorted(name for name in known.intersection(re.findall(r"\bcu\w+", text)) if f" {name}(" not in source)
    stubs = "\n".join(f"NOTHING(stub_{name})" for name in missing)
    aliases = "\n".join(f'__asm__(".globl {name}\\n.set {name}, stub_{name}");' for name in missing)
    file, target = folder / "fake_cuda.c", folder / "libcuda.so.1"
    file.write_text(f"{source}\n{stubs}\n{aliases}\n")
    command = ["gcc", "-shared", "-fPIC", "-w", f"-I{base / 'include'}", "-Wl,-soname,libcuda.so.1", "-o", target, file]
    subprocess.run(command, check=True)
    return ctypes.PyDLL(str(target), mode=ctypes.RTLD_GLOBAL)  # which keeps threads apart
