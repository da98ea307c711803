"""Queries and keys whose scores follow a trend: a common direction in the queries, a component along it in the keys."""

from __future__ import annotations

import torch

from dsl.verify.cases import Trend

_FEW_KEYS = 4


def direction(dim: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """A unit vector that leaves no dimension out, so that no single element grows large."""
    signs = torch.randint(2, (dim,), generator=generator, device=device) * 2 - 1
    return signs / dim**0.5


def follow(
    trend: Trend, queries: torch.Tensor, keys: torch.Tensor, scale: float, along: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries `[row, head, dim]` and keys `[key, dim]` like the given ones, but for their scores' trend."""
    every = min(trend.every, len(queries))
    is_follower = (torch.arange(len(queries), device=queries.device) % every == every // 2)[:, None, None]
    if trend.shape == "zero":
        return torch.where(is_follower, 0.0, queries), keys
    products = levels(trend, len(keys), keys.device) / scale
    reach = products.abs().max().sqrt().clamp(min=1)
    queries = _without(queries, along) + is_follower * reach * along
    return queries, _without(keys, along) + (products / reach)[:, None] * along


def levels(trend: Trend, count: int, device: torch.device) -> torch.Tensor:
    """Where the scores of a row that follows the trend stand, key by key, in nats."""
    place = torch.arange(count, device=device)
    if trend.shape == "level":
        return torch.full((count,), trend.nats, device=device)
    if trend.shape == "ramp":
        rise = place / max(1, count - 1)
        return trend.nats * rise if trend.nats > 0 else -trend.nats * (1 - rise)
    is_high = place < _FEW_KEYS if trend.shape == "first" else place >= count - _FEW_KEYS
    return trend.nats * is_high


def _without(vectors: torch.Tensor, along: torch.Tensor) -> torch.Tensor:
    return vectors - (vectors @ along)[..., None] * along
