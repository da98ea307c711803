"""Where a softmax whose offset is the maximum over a row's first keys, kept for the whole row, would not do.

A kernel that keeps such an offset must notice these rows and compute them again with a running maximum. Counting them
says what that costs on given queries and keys; nothing here depends on a kernel.
"""

from __future__ import annotations

import math

import torch

FIRST_KEYS = 128
SUM_LIMIT = 2.0**64
TILE_ROWS = 64
_SCORE_BYTES = 256 << 20
"""Roughly how many bytes of scores are held at once."""


def failing_rows(q: torch.Tensor, k: torch.Tensor, scale: float, *, first_keys: int = FIRST_KEYS) -> torch.Tensor:
    """Which rows of one packed sequence fail, as bool `[row, head]`.

    `q` is `[row, head, dim]` and `k` `[key, kv_head, dim]`, in the dtype in which a kernel would round its weights. A
    row fails if its sum of weights reaches `SUM_LIMIT`, or if a weight is too large for that dtype. Where keys are cut
    into parts, each part has an offset of its own: pass one part's keys at a time.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    keys = k.float().permute(1, 2, 0)
    fails = torch.zeros(q.shape[:2], dtype=torch.bool, device=q.device)
    if not len(k):
        return fails
    step = max(1, _SCORE_BYTES // (4 * heads * len(k)))
    for start in range(0, len(q), step):
        rows = slice(start, start + step)
        grouped = q[rows].float().unflatten(1, (kv_heads, heads // kv_heads)).permute(1, 2, 0, 3)
        scores = (grouped.flatten(1, 2) @ keys).unflatten(1, grouped.shape[1:3]) * (scale * math.log2(math.e))
        weights = scores.sub_(scores[..., :first_keys].amax(dim=-1, keepdim=True)).exp2_()
        holds = weights.sum(dim=-1) < SUM_LIMIT
        holds &= weights.amax(dim=-1).to(q.dtype).isfinite()
        fails[rows] = ~holds.flatten(0, 1).T
    return fails


def failing_tiles(rows: torch.Tensor, height: int = TILE_ROWS) -> torch.Tensor:
    """Which tiles of `height` rows of a head have a failing row: `[row, head]` to `[tile, head]`."""
    missing = -len(rows) % height
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)).unflatten(0, (-1, height)).any(dim=1)
