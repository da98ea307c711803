"""Queries and keys with what real ones have: attention sinks, outlier channels, norms that grow along the sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
Maker = Callable[[torch.Tensor, torch.Tensor, torch.Generator], Pair]


def _sinks(q: torch.Tensor, k: torch.Tensor, generator: torch.Generator) -> Pair:
    """The queries have a mean of half a unit a channel, and the first four keys are eight times as long, along it."""
    mean = 0.5 * torch.randn(q.shape[1:], generator=generator)
    group = q.shape[1] // k.shape[1]
    k[:4] = 8 * torch.nn.functional.normalize(mean[::group], dim=-1) * q.shape[-1] ** 0.5
    return q + mean, k


def _outlier_channels(spread: float) -> Maker:
    """Three channels of each head have means of 10 to 30, of either sign, and vary by `spread` times their mean."""

    def make(q: torch.Tensor, k: torch.Tensor, generator: torch.Generator) -> Pair:
        for tensor in (q, k):
            factor = 10 + 20 * torch.rand(tensor.shape[1], 3, generator=generator)
            sign = torch.randint(2, factor.shape, generator=generator) * 2 - 1
            tensor[:, :, :3] = factor * (sign + spread * tensor[:, :, :3])
        return q, k

    return make


def _growing(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * torch.linspace(1, 4, len(tensor))[:, None, None]


def _longer(factor: float) -> Maker:
    return lambda q, k, _: (factor * q, k)


KINDS: dict[str, Maker] = {
    "normal": lambda q, k, _: (q, k),
    "sinks": _sinks,
    "outlier channels, 5 % spread": _outlier_channels(0.05),
    "outlier channels, 10 % spread": _outlier_channels(0.1),
    "outlier channels, 25 % spread": _outlier_channels(0.25),
    "growing keys": lambda q, k, _: (q, _growing(k)),
    "growing queries and keys": lambda q, k, _: (_growing(q), _growing(k)),
    "scores x4": _longer(4),
    "scores x8": _longer(8),
    "scores x30": _longer(30),
}


FAILING_TILES: dict[str, dict[str, tuple[float, float]]] = {
    "normal": {"bf16": (0, 0), "fp16": (0, 0)},
    "sinks": {"bf16": (0, 0), "fp16": (0, 0)},
    "outlier channels, 5 % spread": {"bf16": (0, 0), "fp16": (0, 0.15)},
    "outlier channels, 10 % spread": {"bf16": (0, 0), "fp16": (0.3, 0.8)},
    "outlier channels, 25 % spread": {"bf16": (0.03, 0.4), "fp16": (0.95, 1)},
    "growing keys": {"bf16": (0, 0), "fp16": (0.95, 1)},
    "growing queries and keys": {"bf16": (0.1, 0.4), "fp16": (0.95, 1)},
    "scores x4": {"bf16": (0, 0), "fp16": (0.01, 0.2)},
    "scores x8": {"bf16": (0, 0), "fp16": (0.95, 1)},
    "scores x30": {"bf16": (0.95, 1), "fp16": (0.95, 1)},
}
"""Which share of tiles fails at least and at most, at head dim 72, from 4 heads of 2k tokens to 16 heads of 8k."""


def queries_and_keys(
    kind: str, tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str = "cpu"
) -> Pair:
    """`q` `[token, head, dim]` and `k` `[token, kv_head, dim]`, the same on every device.

    The scores of `normal` ones vary by about one nat.
    """
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(tokens, heads, dim, generator=generator)
    k = torch.randn(tokens, kv_heads, dim, generator=generator)
    q, k = KINDS[kind](q, k, generator)
    return q.to(device, dtype), k.to(device, dtype)


def packed_arguments(
    kind: str, tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """One packed sequence of such queries and keys, with random values."""
    q, k = queries_and_keys(kind, tokens, heads, kv_heads, dim, dtype, device)
    v = torch.randn(k.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
