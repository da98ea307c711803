"""FlashInfer: its wrappers plan for a batch once and run many times; it may compile when a shape's kind is new."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch

from dsl.bench.peers.libraries import described, library
from dsl.bench.peers.work import HND, NHD, Attention, Refused, Work

_WORKSPACE_BYTES = 256 << 20
_TENSOR_CORE_GROUP = 4
"""From how many query heads per KV head on its decode is faster on tensor cores, by its own documentation."""


@dataclass(frozen=True)
class FlashInfer:
    name: str
    origin: str
    module: ModuleType

    def bind(self, work: Work) -> Attention:
        return self._prefill(work) if work.family == "prefill" else self._decode(work)

    def _prefill(self, work: Work) -> Attention:
        q, k, v, spec = work.query, work.keys, work.values, work.spec
        wrapper = self.module.BatchPrefillWithRaggedKVCacheWrapper(_workspace(q.device), "NHD")
        wrapper.plan(
            work.inputs["cu_seqlens_q"],
            work.inputs["cu_seqlens_k"],
            spec.heads,
            spec.kv_heads,
            spec.head_dim_qk,
            head_dim_vo=spec.head_dim_v,
            causal=False,
            sm_scale=work.scale,
            q_data_type=q.dtype,
            kv_data_type=k.dtype,
        )
        return lambda: wrapper.run(q, k, v)

    def _decode(self, work: Work) -> Attention:
        query, caches, spec = work.query, work.pages(NHD, HND), work.spec
        if spec.head_dim_qk != spec.head_dim_v:
            raise Refused("takes one head dimension for keys and values")
        wrapper = self.module.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(query.device),
            "NHD" if spec.k_layout == NHD else "HND",
            use_tensor_cores=spec.group >= _TENSOR_CORE_GROUP,
        )
        wrapper.plan(
            *_page_lists(work),
            spec.heads,
            spec.kv_heads,
            spec.head_dim_qk,
            spec.block,
            sm_scale=work.scale,
            q_data_type=query.dtype,
            kv_data_type=caches[0].dtype,
        )
        return lambda: wrapper.run(query, caches)


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    """Scratch that all wrappers may share, since their runs follow each other."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _page_lists(work: Work) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where each sequence's pages begin in a list of all, that list, and the tokens in each last page, int32."""
    table, block = work.inputs["block_tables"], work.spec.block
    assert block is not None
    counts = [-(-length // block) for length in work.case.kv_lens]
    indices = torch.cat([table[seq, :count] for seq, count in enumerate(counts)])
    last = [length and (length - 1) % block + 1 for length in work.case.kv_lens]
    numbers = functools.partial(torch.tensor, dtype=torch.int32, device=table.device)
    return numbers([0, *accumulate(counts)]), indices.int(), numbers(last)


def find(name: str, **_: Any) -> FlashInfer:
    """Raises Absent."""
    module = library("flashinfer")
    return FlashInfer(name, described(module), module)
