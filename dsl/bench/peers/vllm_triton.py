"""vLLM's own Triton kernel for one query token per sequence over pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dsl.bench.peers.libraries import described, library
from dsl.bench.peers.work import HND, Attention, Refused, Work
from dsl.layout import is_power_of_two
from dsl.spec import Axis
from dsl.verify.layouts import to_logical

_LEAST = 16
"""Triton multiplies no tile with fewer rows or columns."""


@dataclass(frozen=True)
class VllmTriton:
    """`kernel` takes what its version calls its arguments by; those with an `x` read the x-split K cache."""

    name: str
    origin: str
    kernel: Any

    def bind(self, work: Work) -> Attention:
        spec, query = work.spec, work.query
        if spec.head_dim_qk != spec.head_dim_v:
            raise Refused("takes one head dimension for keys and values")
        if spec.block is None or spec.block < _LEAST or not is_power_of_two(spec.block):
            raise Refused(f"takes pages of a power of two from {_LEAST} tokens on")
        k_cache, v_cache = self._caches(work)
        out = torch.empty_like(query)
        values = {
            "output_ptr": out,
            "query_ptr": query,
            "key_cache_ptr": k_cache,
            "value_cache_ptr": v_cache,
            "block_tables_ptr": work.inputs["block_tables"],
            "seq_lens_ptr": work.inputs["seq_lens"],
            "scale": work.scale,
            "out_scale_inv": 1.0,
            "num_query_heads": spec.heads,
            "num_queries_per_kv": spec.group,
            "num_queries_per_kv_padded": max(_power_of_two_from(spec.group), _LEAST),
            "block_table_stride": work.inputs["block_tables"].stride(0),
            "query_stride_0": query.stride(0),
            "query_stride_1": query.stride(1),
            "output_stride_0": out.stride(0),
            "output_stride_1": out.stride(1),
            "BLOCK_SIZE": spec.block,
            "PHYSICAL_BLOCK_SIZE": spec.block,
            "HEAD_SIZE": spec.head_dim_qk,
            "HEAD_SIZE_PADDED": _power_of_two_from(spec.head_dim_qk),
            "USE_ALIBI_SLOPES": False,
            "SLIDING_WINDOW": 0,
            "x": k_cache.shape[-1],
            **{f"stride_k_cache_{place}": stride for place, stride in enumerate(k_cache.stride())},
            **{f"stride_v_cache_{place}": stride for place, stride in enumerate(v_cache.stride())},
            "filter_by_query_len": False,
            "USE_SINKS": False,
            "USE_FP8": False,
        }
        unused = ("sink_ptr", "alibi_slopes_ptr", "k_scale", "v_scale", "query_start_len_ptr")
        values |= dict.fromkeys(unused)
        arguments = {name: values[name] for name in self.kernel.arg_names if name in values}
        launch = self.kernel[(work.seqs, spec.kv_heads)]

        def attention() -> torch.Tensor:
            launch(**arguments)
            return out

        return attention

    def _caches(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        """The caches in the axes that this version strides over. Raises Refused."""
        spec, caches = work.spec, (work.inputs["k_cache"], work.inputs["v_cache"])
        if "x" in self.kernel.arg_names:
            x = spec.k_layout[-1].factor
            split = (Axis("block"), Axis("kv_head"), Axis("dim", "outer", x), Axis("slot"), Axis("dim", "inner", x))
            slots_last = (Axis("block"), Axis("kv_head"), Axis("dim"), Axis("slot"))
            if spec.k_layout != split or spec.v_layout != slots_last:
                raise Refused(
                    "reads caches as [block, kv_head, dim/x, slot, dim%x] and [block, kv_head, dim, slot] only"
                )
            return caches
        layouts = (spec.k_layout, spec.v_layout)
        if any(set(layout) != set(HND) for layout in layouts):
            raise Refused("reads caches without split axes only")
        axes = [axis.name for axis in HND]
        k_cache, v_cache = (to_logical(cache, layout, axes) for cache, layout in zip(caches, layouts, strict=True))
        return k_cache, v_cache


def _power_of_two_from(number: int) -> int:
    return 1 << (number - 1).bit_length()


def find(name: str, **_: Any) -> VllmTriton:
    """Raises Absent."""
    module = library(
        "vllm.v1.attention.ops.chunked_prefill_paged_decode", "vllm.attention.ops.chunked_prefill_paged_decode"
    )
    return VllmTriton(name, described(module), module.kernel_paged_attention_2d)
