"""Params on the host: what a launcher expects of each, and what it hands to a kernel."""

from __future__ import annotations

from dataclasses import dataclass

from dsl.expr.to_triton import TensorParam
from dsl.spec import Param, Spec

_TORCH = {
    "int32": "torch.int32",
    "int64": "torch.int64",
    "bool": "torch.bool",
    "bf16": "torch.bfloat16",
    "fp16": "torch.float16",
    "fp32": "torch.float32",
}
_PYTHON = {"int32": "int", "int64": "int", "bool": "bool", "bf16": "float", "fp16": "float", "fp32": "float"}
_SCHEMA = {"int": "SymInt", "bool": "bool", "float": "float"}


@dataclass(frozen=True, slots=True)
class HostParam:
    """One param. `local` is its name in helpers, where a name of the caller's could hide one of theirs.

    `extents` are printed, `large` the axes along which a kernel counts in 32 bits; `arguments` are what kernels get.
    """

    name: str
    dtype: str
    axes: tuple[str, ...] | None
    extents: tuple[str, ...] = ()
    large: tuple[int, ...] = ()
    arguments: tuple[tuple[str, str], ...] = ()

    @property
    def local(self) -> str:
        return f"param_{self.name}"

    @property
    def is_tensor(self) -> bool:
        return self.axes is not None

    @property
    def torch_dtype(self) -> str:
        return _TORCH[self.dtype]

    @property
    def python_type(self) -> str:
        return _PYTHON[self.dtype]

    @property
    def annotation(self) -> str:
        return "torch.Tensor" if self.is_tensor else self.python_type

    @property
    def schema(self) -> str:
        return "Tensor" if self.is_tensor else _SCHEMA[self.python_type]

    @property
    def axes_text(self) -> str:
        return f"[{', '.join(self.axes or ())}]"

    @property
    def expected(self) -> str:
        """The printed shape."""
        return f"({', '.join(self.extents)}{',' if len(self.extents) == 1 else ''})"

    @property
    def large_axes(self) -> str:
        return f"({', '.join(map(str, self.large))}{',' if len(self.large) == 1 else ''})"

    @property
    def as_tensor(self) -> str:
        """The printed tensor that the reference reads: a number is one, of the type that expressions have."""
        if self.is_tensor:
            return self.local
        kind = {"int": self.torch_dtype, "bool": "torch.bool", "float": "torch.float32"}[self.python_type]
        return f"torch.tensor({self.local}, dtype={kind}, device=device)"

    @property
    def documentation(self) -> str:
        what = f"{self.axes_text}, {self.torch_dtype.removeprefix('torch.')}" if self.is_tensor else self.dtype
        return f"{self.name}: {what}"


def tensor_param(param: Param, spec: Spec) -> TensorParam:
    """A tensor param as a kernel sees it. Extents that the spec fixes are numbers."""
    assert param.axes is not None
    known = {"head": spec.heads, "kv_head": spec.kv_heads}
    extents: list[int | str] = []
    for place, axis in enumerate(param.axes):
        fixed = known.get(axis) if isinstance(axis, str) else axis
        extents.append(f"extent_param_{param.name}_{place}" if fixed is None else fixed)
    strides = tuple(f"stride_param_{param.name}_{place}" for place in range(len(param.axes)))
    return TensorParam(param.name, param.dtype, tuple(extents), strides)


def host_params(spec: Spec, extents: dict[str, str], large: frozenset[tuple[str, int]]) -> tuple[HostParam, ...]:
    """A block's params. `extents` prints the extent of each axis that has one in the launcher, `None` for any."""
    return tuple(_host_param(param, spec, extents, large) for param in spec.params)


def _host_param(param: Param, spec: Spec, extents: dict[str, str], large: frozenset[tuple[str, int]]) -> HostParam:
    local = f"param_{param.name}"
    if param.axes is None:
        value = f"int({local})" if param.dtype == "bool" else local
        return HostParam(param.name, param.dtype, None, arguments=((local, value),))
    tensor = tensor_param(param, spec)
    sizes = [(name, f"{local}.size({place})") for place, name in enumerate(tensor.extents) if isinstance(name, str)]
    strides = [(name, f"{local}.stride({place})") for place, name in enumerate(tensor.strides)]
    return HostParam(
        param.name,
        param.dtype,
        tuple(map(str, param.axes)),
        tuple(extents[axis] if isinstance(axis, str) else str(axis) for axis in param.axes),
        tuple(sorted(place for name, place in large if name == param.name)),
        ((local, local), *strides, *sizes),
    )
