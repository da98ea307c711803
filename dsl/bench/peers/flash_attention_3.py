"""FlashAttention-3: vLLM's build of it as a shared object, its own package, or vLLM's, whichever is there first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dsl.bench.peers.libraries import described, library, one_line
from dsl.bench.peers.work import NHD, Absent, Attention, Refused, Work

_WIDEST = 256


@dataclass(frozen=True)
class FlashAttention3:
    """One way to call it for each family; the calls take nothing, since they are bound to a case."""

    name: str
    origin: str
    prefill: Callable[[Work], Attention]
    decode: Callable[[Work], Attention]

    def bind(self, work: Work) -> Attention:
        if work.spec.head_dim_qk > _WIDEST:
            raise Refused(f"takes head dimensions up to {_WIDEST}")
        return self.prefill(work) if work.family == "prefill" else self.decode(work)


def find(name: str, *, fa3: str | Path | None = None, **_: Any) -> FlashAttention3:
    """Raises Absent."""
    if fa3 is not None:
        return _from_shared_object(name, Path(fa3))
    try:
        module = library("flash_attn_interface")
        return FlashAttention3(name, described(module), varlen(module), _own_decode(module))
    except Absent as first:
        try:
            module = library("vllm.vllm_flash_attn")
            if not module.is_fa_version_supported(3):
                raise Absent(f"vLLM: {module.fa_version_unsupported_reason(3)}")
        except Absent as second:
            raise Absent(f"{first}; {second}; --fa3 takes vLLM's _vllm_fa3_C.abi3.so") from second
        return FlashAttention3(name, described(module), varlen(module, fa_version=3), _vllm_decode(module))


def _longest(work: Work) -> tuple[int, int]:
    return max(work.case.q_lens), max(work.case.kv_lens)


def _one_query_each(work: Work) -> torch.Tensor:
    """The bounds of packed queries where every sequence has one."""
    return torch.arange(work.seqs + 1, dtype=torch.int32, device=work.query.device)


# vLLM's operator, by position: q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new,
# seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, three of rotary embedding,
# three scales, softmax_scale, causal, the window's two sides, softcap, rotary_interleaved, scheduler_metadata,
# num_splits, pack_gqa, sm_margin, sinks, and three of context parallelism.


def _from_shared_object(name: str, file: Path) -> FlashAttention3:
    try:
        torch.ops.load_library(str(file))
    except Exception as error:
        raise Absent(f"{file} cannot be loaded: {one_line(error)}") from error
    operators = torch.ops._vllm_fa3_C

    def prefill(work: Work) -> Attention:
        q, k, v = work.query, work.keys, work.values
        bounds = (work.inputs["cu_seqlens_q"], work.inputs["cu_seqlens_k"])
        before = (q, k, v, None, None, None, None, *bounds, None, None, None, *_longest(work), *[None] * 9)
        after = (work.scale, False, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None)
        return lambda: operators.fwd(*before, *after)[0]

    def decode(work: Work) -> Attention:
        query, (k_cache, v_cache), spec = work.query, work.pages(NHD), work.spec
        table, lengths, bounds = work.inputs["block_tables"], work.inputs["seq_lens"], _one_query_each(work)
        longest = max(work.case.kv_lens)
        heads = (spec.heads, spec.kv_heads, spec.head_dim_qk, spec.head_dim_v, query.dtype)
        nothing = (None, None, None, None)
        rest = (spec.block, 0, True, -1, -1, False, 0, None, 0)
        plan = operators.get_scheduler_metadata(work.seqs, 1, longest, *heads, lengths, bounds, *nothing, *rest)
        before = (query, k_cache, v_cache, None, None, None, None, bounds, None, None, None, lengths, 1, longest, table)
        after = (work.scale, True, -1, -1, 0.0, True, plan, 0, None, 0, None, 1, 0, None)
        return lambda: operators.fwd(*before, *[None] * 8, *after)[0]

    return FlashAttention3(name, str(file), prefill, decode)


def varlen(module: ModuleType, **options: Any) -> Callable[[Work], Attention]:
    """Packed sequences through a module's `flash_attn_varlen_func`, whose keywords all FlashAttentions share."""

    def bind(work: Work) -> Attention:
        q, k, v = work.query, work.keys, work.values
        longest_q, longest_k = _longest(work)
        arguments = {
            "cu_seqlens_q": work.inputs["cu_seqlens_q"],
            "cu_seqlens_k": work.inputs["cu_seqlens_k"],
            "max_seqlen_q": longest_q,
            "max_seqlen_k": longest_k,
            "softmax_scale": work.scale,
            **options,
        }
        return lambda: _first(module.flash_attn_varlen_func(q, k, v, **arguments))

    return bind


def _own_decode(module: ModuleType) -> Callable[[Work], Attention]:
    def bind(work: Work) -> Attention:
        query, (k_cache, v_cache) = work.query.unsqueeze(1), work.pages(NHD)
        arguments = {
            "cache_seqlens": work.inputs["seq_lens"],
            "page_table": work.inputs["block_tables"],
            "softmax_scale": work.scale,
        }
        return lambda: _first(module.flash_attn_with_kvcache(query, k_cache, v_cache, **arguments))

    return bind


def _vllm_decode(module: ModuleType) -> Callable[[Work], Attention]:
    def bind(work: Work) -> Attention:
        query, (k_cache, v_cache) = work.query, work.pages(NHD)
        arguments = {
            "cu_seqlens_q": _one_query_each(work),
            "max_seqlen_q": 1,
            "seqused_k": work.inputs["seq_lens"],
            "max_seqlen_k": max(work.case.kv_lens),
            "block_table": work.inputs["block_tables"],
            "softmax_scale": work.scale,
            "causal": True,
            "fa_version": 3,
        }
        return lambda: _first(module.flash_attn_varlen_func(query, k_cache, v_cache, **arguments))

    return bind


def _first(result: Any) -> torch.Tensor:
    """The output, where a version returns the log-sum-exp beside it."""
    return result[0] if isinstance(result, tuple) else result
