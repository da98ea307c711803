"""Kernels that the interpreter gets wrong until it is repaired; as a script, it prints what they compute as JSON."""

# pyright: reportArgumentType=false
# A number for a `tl.constexpr` is what Triton wants.

from __future__ import annotations

import json

import torch
import triton
import triton.language as tl

from dsl.verify.interpreter import repair

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SIZE = 16


@triton.jit
def dot_kernel(left, right, out, steps, INNER: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    inner = tl.arange(0, INNER)
    acc = tl.zeros([SIZE, SIZE], tl.float32)
    for _ in range(steps):
        a = tl.load(left + row * INNER + inner[None, :])
        b = tl.load(right + inner[:, None] * SIZE + column)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    tl.store(out + row * SIZE + column, acc)


@triton.jit
def cast_kernel(source, out, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out + index, tl.load(source + index).to(out.dtype.element_ty))


@triton.jit
def product_kernel(left, right, out, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    product = tl.load(left + index) * tl.load(right + index)
    tl.store(out + index, tl.maximum(product, -product).to(tl.float32))


def dot_error(dtype: torch.dtype, precision: str) -> float:
    """The relative error of a dot against float64 of the same rounded inputs."""
    left, right = torch.randn(SIZE, 32).to(dtype), torch.randn(32, SIZE).to(dtype)
    out = torch.empty(SIZE, SIZE)
    dot_kernel[(1,)](left, right, out, 2, 32, SIZE, precision)
    wanted = 2 * (left.double() @ right.double())
    return ((out - wanted).norm() / wanted.norm()).item()


def cast_differences(source: torch.dtype, target: torch.dtype) -> int:
    """Elements that a cast rounds otherwise than PyTorch: among them one whose rounding carries, and special values."""
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 0.99999, 255.9, 1e-30, 3.0000001])
    values = torch.cat([torch.randn(4088) * 100, special]).to(source)
    out = torch.empty(4096, dtype=target)
    cast_kernel[(1,)](values, out, 4096)
    return int((out != values.to(target)).sum())


def product_error() -> float:
    left, right = torch.randn(64).bfloat16(), torch.randn(64).bfloat16()
    out = torch.empty(64)
    product_kernel[(1,)](left, right, out, 64)
    return (out - (left * right).abs().float()).abs().max().item()


def main() -> None:
    repair()
    repair()
    torch.manual_seed(0)
    precisions = ("ieee", "tf32", "tf32x3")
    casts = [("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "fp32"), ("bf16", "fp16"), ("fp16", "bf16")]
    result = {
        "triton": triton.__version__,
        "dot": {f"{name} {mode}": dot_error(dtype, mode) for name, dtype in DTYPES.items() for mode in precisions},
        "cast": {f"{a} to {b}": cast_differences(DTYPES[a], DTYPES[b]) for a, b in casts},
        "product": product_error(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
