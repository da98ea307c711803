"""Repairs of Triton's interpreter, which computes some things that no GPU computes.

The interpreter keeps bf16 and fp8 as the integers of their bits. As released (3.6 to 3.9), `tl.dot` and plain
arithmetic work on those integers, a cast to bf16 truncates or loses the carry of its rounding, and an fp32 `tl.dot`
ignores `input_precision`, so that a kernel that would use TF32 on a GPU looks exact here. Every repair stands in this
file.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

_BITS = {
    "bf16": torch.bfloat16,
    "fp8e5": torch.float8_e5m2,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
"""Types whose values the interpreter stores as bits, by Triton's name for them."""


def repair() -> None:
    """Repair the installed Triton's interpreter. Call it before the first kernel runs; twice is harmless."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "is_repaired", False):
        return
    builder.is_repaired = True  # type: ignore[attr-defined]
    _repair_casts(interpreter, builder)
    _repair_arithmetic(interpreter, builder)
    _repair_dot(interpreter, builder)
    _repair_scalars(interpreter)
    _repair_conditions(interpreter, builder)
    _repair_overflow(interpreter)


def _is_bits(handle: Any) -> bool:
    return handle.dtype.scalar.name in _BITS


def _values(handle: Any) -> np.ndarray:
    """What a handle's array means: float32 for types that are stored as bits, the array itself for all others."""
    dtype = _BITS.get(handle.dtype.scalar.name)
    if dtype is None:
        return handle.data
    return torch.from_numpy(np.array(handle.data, order="C")).view(dtype).float().numpy()


def _bits(values: np.ndarray, name: str) -> np.ndarray:
    """Round to nearest even, and return the integers that the interpreter stores."""
    dtype = _BITS[name]
    rounded = torch.from_numpy(np.array(values, dtype=np.float32, order="C")).to(dtype)
    return rounded.view(torch.uint16 if dtype.itemsize == 2 else torch.uint8).numpy()


def _repair_casts(interpreter: Any, builder: Any) -> None:
    original_fp_to_fp = builder.create_fp_to_fp

    def cast(self: Any, source: Any, target: Any) -> Any:
        scalar = target.scalar
        values = _values(source)
        if scalar.name in _BITS:
            return interpreter.TensorHandle(_bits(values, scalar.name), scalar)
        return interpreter.TensorHandle(values.astype(interpreter._get_np_dtype(scalar)), scalar)

    def fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if rounding == interpreter._ir.ROUNDING_MODE.RTZ:
            return original_fp_to_fp(self, source, target, rounding)
        return cast(self, source, target)

    builder.cast_impl = cast
    builder.create_fp_to_fp = fp_to_fp


def _repair_arithmetic(interpreter: Any, builder: Any) -> None:
    original_binary, original_unary = builder.binary_op, builder.unary_op

    def rounded(output: np.ndarray, dtype: Any) -> Any:
        is_test = output.dtype == np.bool_
        return interpreter.TensorHandle(output if is_test else _bits(output, dtype.name), dtype)

    def binary(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if not _is_bits(left):
            return original_binary(self, left, right, operation)
        return rounded(operation(_values(left), _values(right)), left.dtype.scalar)

    def unary(self: Any, operand: Any, operation: Any) -> Any:
        if not _is_bits(operand):
            return original_unary(self, operand, operation)
        return rounded(operation(_values(operand)), operand.dtype.scalar)

    builder.binary_op = binary
    builder.unary_op = unary
    # minnum and maxnum return the operand that is a number, as tl.minimum and tl.maximum do on a GPU.
    builder.create_minnumf = lambda self, left, right: self.binary_op(left, right, np.fmin)
    builder.create_maxnumf = lambda self, left, right: self.binary_op(left, right, np.fmax)


def _repair_dot(interpreter: Any, builder: Any) -> None:
    original = builder.create_dot

    def dot(self: Any, left: Any, right: Any, accumulator: Any, input_precision: Any, max_imprecise: Any) -> Any:
        if not accumulator.dtype.scalar.is_floating():
            return original(self, left, right, accumulator, input_precision, max_imprecise)
        a, b = _values(left), _values(right)
        if a.dtype == np.float64:
            return original(self, left, right, accumulator, input_precision, max_imprecise)
        if left.dtype.scalar.name == "fp32" and input_precision == interpreter._ir.INPUT_PRECISION.TF32:
            a, b = _tf32(a), _tf32(b)
        product = np.matmul(a.astype(np.float32), b.astype(np.float32)) + _values(accumulator)
        scalar = accumulator.dtype.scalar
        data = _bits(product, scalar.name) if scalar.name in _BITS else product.astype(accumulator.data.dtype)
        return interpreter.TensorHandle(data, scalar)

    builder.create_dot = dot


def _tf32(values: np.ndarray) -> np.ndarray:
    """What a tensor core reads of an fp32 operand: the upper 19 bits."""
    return (np.array(values, dtype=np.float32, order="C").view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _repair_scalars(interpreter: Any) -> None:
    """NumPy 2.4 no longer turns an array of one element into an index, which a loop over a run-time range needs."""
    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def _repair_conditions(interpreter: Any, builder: Any) -> None:
    """A condition that is spread over a tile stays one; as released it becomes an integer, which masks no load."""
    original = builder.create_splat

    def splat(self: Any, result_type: Any, operand: Any) -> Any:
        if operand.data.dtype != np.bool_:
            return original(self, result_type, operand)
        return interpreter.TensorHandle(np.full(result_type.shape, operand.data.item()), interpreter.tl.int1)

    builder.create_splat = splat


def _repair_overflow(interpreter: Any) -> None:
    """Integers wrap, as they do on a GPU; as released the interpreter stops there."""
    shared = interpreter.interpreter_builder
    shared.options = dataclasses.replace(shared.options, sanitize_overflow=False)
