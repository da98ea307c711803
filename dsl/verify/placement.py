"""Where tensors lie: contiguous, or as slices of wider buffers whose rest must neither be read nor written."""

from __future__ import annotations

import math
from typing import Literal

import torch

from dsl.verify.oracle import FP8

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int8": torch.int8, **FP8}
SENTINEL = 7.0
INT8_STEPS = 40
"""How many steps of an int8 cache make 1."""

Views = Literal["none", "aligned", "odd"]


def stored(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """fp32 values in a spec's dtype."""
    if dtype == "int8":
        steps = torch.nan_to_num(INT8_STEPS * values, nan=127).round()
        return steps.clamp(-127, 127).to(torch.int8)
    return values.to(DTYPES[dtype])


def placed(values: torch.Tensor, dtype: str, views: Views) -> torch.Tensor:
    """The values as a tensor of `dtype`; under `views` its last axis is a slice of a wider one that holds NaN."""
    return _slice(values, dtype, views, math.nan)[0]


def interleaved(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """The values as every other entry of a buffer along the first axis, as where K and V share one allocation."""
    return stored(torch.stack([values, torch.full_like(values, math.nan)], dim=1), dtype)[:, 0]


def output(shape: torch.Size, dtype: str, views: Views, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A caller's output buffer full of NaN, and the sentinels beside it."""
    return _slice(torch.full(shape, math.nan, device=device), dtype, views, SENTINEL)


def _slice(values: torch.Tensor, dtype: str, views: Views, rest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The slice and what lies beside it: behind it by 16 bytes, or for `odd` in front of it by one element."""
    extra = {"none": 0, "aligned": 16 // DTYPES[dtype].itemsize, "odd": 1}[views]
    beside = torch.full((*values.shape[:-1], extra), rest, device=values.device)
    extent = values.shape[-1]
    if views == "odd":
        buffer = stored(torch.cat([beside, values], dim=-1), dtype)
        return buffer[..., extra:], buffer[..., :extra]
    buffer = stored(torch.cat([values, beside], dim=-1), dtype)
    return buffer[..., :extent], buffer[..., extent:]
