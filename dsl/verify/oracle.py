"""The oracle: dense attention in float64 from the spec alone, in blocks of query rows, on a CPU or a GPU.

It shares no planner, printer or template with the kernels, so that the two cannot be wrong together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from dsl.spec import Layout, Spec
from dsl.verify.evaluate import Scope, evaluate
from dsl.verify.layouts import to_logical, to_physical
from dsl.verify.sequences import Sequence, rows, sequences

_BLOCK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}

QUERY_AXES = {
    "decode": ("seq", "head", "dim"),
    "prefill": ("q_token", "head", "dim"),
    "paged": ("q_token", "head", "dim"),
    "dense": ("seq", "q_token", "head", "dim"),
}
FP8 = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2": torch.float8_e5m2,
}


def oracle(spec: Spec, arguments: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a whole batch: `out` float64 in the spec's output layout, and `lse` float64, natural log.

    `arguments` maps the launcher's argument names to what a caller passes; optional ones may be absent. `lse` is
    `[head, seq]`, `[head, q_token]` or `[seq, head, q_token]`.
    """
    total = rows(spec, arguments)
    out, lse = oracle_rows(spec, arguments, torch.arange(total))
    if spec.family != "dense":
        return to_physical(out, spec.out_layout, QUERY_AXES[spec.family]), lse.T.contiguous()
    seqs = len(sequences(spec, arguments))
    shape = (seqs, total // max(seqs, 1))
    out = to_physical(out.unflatten(0, shape), spec.out_layout, QUERY_AXES["dense"])
    return out, lse.unflatten(0, shape).transpose(1, 2).contiguous()


def oracle_rows(spec: Spec, arguments: Mapping[str, Any], wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of some query rows: `out` `[row, head, DV]` and `lse` `[row, head]`, both float64.

    `wanted` holds row numbers as `row_view` counts them.
    """
    query = row_view(spec, arguments[spec.arguments[0]], spec.q_layout)
    wanted = wanted.to(query.device)
    out = torch.zeros(len(wanted), spec.heads, spec.head_dim_v, dtype=torch.float64, device=query.device)
    lse = torch.full((len(wanted), spec.heads), -math.inf, dtype=torch.float64, device=query.device)
    for sequence in sequences(spec, arguments):
        owned = (wanted >= sequence.row_start) & (wanted < sequence.row_start + sequence.q_len)
        places = owned.nonzero().flatten()
        if not len(places):
            continue
        keys, values = keys_and_values(spec, arguments, sequence)
        budget = _BLOCK_BYTES[query.device.type] // (8 * spec.heads * (sequence.kv_len + 1))
        for block in places.split(max(1, budget)):
            queries = query[wanted[block]].double()
            out[block], lse[block] = _attend(spec, arguments, sequence, wanted[block], queries, keys, values)
    return out, lse


def row_view(spec: Spec, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A query or output tensor as `[row, head, dim]`; rows of a dense batch run over q_token within seq."""
    logical = to_logical(tensor, layout, QUERY_AXES[spec.family])
    return logical.flatten(0, 1) if spec.family == "dense" else logical


def lse_row_view(spec: Spec, lse: torch.Tensor) -> torch.Tensor:
    """A log-sum-exp as the launcher returns it as `[row, head]`."""
    return lse.transpose(1, 2).flatten(0, 1) if spec.family == "dense" else lse.T


def visible_keys(spec: Spec, arguments: Mapping[str, Any], sequence: Sequence) -> torch.Tensor:
    """Which keys some query of the sequence may see: bool `[kv_len]`. Wants a batch of ordinary size."""
    device = arguments[spec.arguments[0]].device
    if sequence.q_len == 0:
        return torch.zeros(sequence.kv_len, dtype=torch.bool, device=device)
    row_numbers = torch.arange(sequence.row_start, sequence.row_start + sequence.q_len, device=device)
    visible = evaluate(spec.mask, _scope(spec, arguments, sequence, row_numbers))
    return visible.expand(spec.heads, sequence.q_len, sequence.kv_len).any(dim=0).any(dim=0)


def _attend(
    spec: Spec,
    arguments: Mapping[str, Any],
    sequence: Sequence,
    row_numbers: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One block of rows against all keys of its sequence: `[R, H, DQK]` to `[R, H, DV]` and `[R, H]`."""
    count, kv_len = len(queries), len(keys)
    grouped = queries.unflatten(1, (spec.kv_heads, spec.group))
    score = torch.einsum("rkgd,nkd->kgrn", grouped, keys).flatten(0, 1) * score_scale(spec, arguments)
    scope = _scope(spec, arguments, sequence, row_numbers, score)
    visible = evaluate(spec.mask, scope)
    score = torch.where(visible, evaluate(spec.score, scope), -math.inf).expand(spec.heads, count, kv_len)

    sink = torch.full((1, 1, 1), -math.inf, dtype=torch.float64, device=score.device)
    if spec.sink is not None:
        sink = evaluate(spec.sink, scope).double()
    logits = torch.cat([score, sink.expand(spec.heads, count, 1)], dim=2)
    lse = torch.logsumexp(logits, dim=2)
    weights = torch.exp(score - torch.where(lse == -math.inf, 0, lse)[:, :, None])

    seen = (score != -math.inf).flatten(0, 1).any(dim=0)
    values = torch.where(seen[:, None, None], values, 0)
    weighted = torch.einsum("kgrn,nkd->rkgd", weights.unflatten(0, (spec.kv_heads, spec.group)), values)
    return weighted.flatten(1, 2), lse.T


def score_scale(spec: Spec, arguments: Mapping[str, Any]) -> float:
    """What a product of query and key is multiplied by."""
    return float(arguments[spec.scale] if isinstance(spec.scale, str) else spec.scale)


def _scope(
    spec: Spec,
    arguments: Mapping[str, Any],
    sequence: Sequence,
    row_numbers: torch.Tensor,
    score: torch.Tensor | None = None,
) -> Scope:
    """The names of an expression, shaped to broadcast to `[head, row, key]`."""
    device = row_numbers.device
    keys = torch.arange(sequence.kv_len, device=device)[None, None, :]
    heads = torch.arange(spec.heads, device=device)[:, None, None]
    rows_in_sequence = (row_numbers - sequence.row_start)[None, :, None]
    q_token = rows_in_sequence if spec.family == "dense" else row_numbers[None, :, None]
    names = {
        "q": sequence.first_position + rows_in_sequence,
        "kv": keys,
        "h": heads,
        "head": heads,
        "kv_head": heads // spec.group,
        "b": sequence.index,
        "seq": sequence.index,
        "q_token": q_token,
        "kv_token": sequence.kv_start + keys,
        "q_len": sequence.q_len,
        "kv_len": sequence.kv_len,
        **{param.name: arguments[param.name] for param in spec.params if param.axes is None},
    }
    if score is not None:
        names["score"] = score
    tensors = {param.name: arguments[param.name] for param in spec.params if param.axes is not None}
    return Scope(names, tensors, spec.heads, device)


def keys_and_values(spec: Spec, arguments: Mapping[str, Any], sequence: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence's keys `[kv_len, KV, DQK]` and values `[kv_len, KV, DV]` in float64, dequantised."""
    is_paged = spec.kv == "paged"
    read = _read_pages if is_paged else _read_tokens
    keys = read(spec, arguments, sequence, "k_cache" if is_paged else "k", spec.k_layout)
    if spec.shared_kv:
        return keys, keys[:, :, : spec.head_dim_v]
    return keys, read(spec, arguments, sequence, "v_cache" if is_paged else "v", spec.v_layout)


def _read_pages(
    spec: Spec, arguments: Mapping[str, Any], sequence: Sequence, name: str, layout: Layout
) -> torch.Tensor:
    cache, block = arguments[name], spec.block
    assert block is not None
    pages = arguments["block_tables"][sequence.index, : -(-sequence.kv_len // block)].long()
    axis = next(position for position, part in enumerate(layout) if part.name == "block")
    picked = _numbers(spec, _stored(cache).index_select(axis, pages))
    values = to_logical(picked, layout, ("block", "slot", "kv_head", "dim")).flatten(0, 1)[: sequence.kv_len]
    scale = arguments.get(f"{name[0]}_scale")
    if scale is None:
        return values
    if spec.kv_scale_axes == ("block", "slot", "kv_head"):
        return values * scale[pages].double().flatten(0, 1)[: sequence.kv_len, :, None]
    return values * _head_scale(spec, scale, sequence)


def _read_tokens(
    spec: Spec, arguments: Mapping[str, Any], sequence: Sequence, name: str, layout: Layout
) -> torch.Tensor:
    stored = _stored(arguments[name])
    if spec.family == "dense":
        tokens = to_logical(stored, layout, ("seq", "kv_token", "kv_head", "dim"))[sequence.index]
    else:
        tokens = to_logical(stored, layout, ("kv_token", "kv_head", "dim"))
    values = _numbers(spec, tokens[sequence.kv_start : sequence.kv_start + sequence.kv_len])
    scale = arguments.get(f"{name[0]}_scale")
    return values if scale is None else values * _head_scale(spec, scale, sequence)


def _head_scale(spec: Spec, scale: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """A per-tensor, per-head or per-sequence-and-head scale, shaped to multiply `[kv_len, KV, dim]`."""
    if spec.kv_scale_axes == ("seq", "kv_head"):
        scale = scale[sequence.index]
    return scale.double().reshape(-1, 1)


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or its bits where it is fp8, on which few operations work."""
    return tensor.view(torch.uint8) if tensor.dtype in FP8.values() else tensor


def _numbers(spec: Spec, stored: torch.Tensor) -> torch.Tensor:
    """What stored elements mean, in float64."""
    return (stored.view(FP8[spec.kv_dtype]) if spec.kv_dtype in FP8 else stored).double()
