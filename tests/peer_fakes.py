"""Libraries that look like the peers' and compute in plain float32, and peers that misbehave.

A library computes from the arguments that it is passed and from nothing else: a wrong argument is a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from dsl.bench.peers.work import Attention, Work
from dsl.verify.layouts import to_logical
from dsl.verify.oracle import oracle
from tests.bench_fakes import FakeClock

SECONDS = 2e-3
"""So long that a call is timed a few times only: these libraries really compute."""


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """`[q_token, head, dim]` over `[kv_token, kv_head, dim]`."""
    group = q.shape[1] // k.shape[1]
    keys, values = (tensor.float().repeat_interleave(group, 1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)


def module(name: str, **members: Any) -> ModuleType:
    result = ModuleType(name)
    vars(result).update(members)
    return result


@dataclass
class Library:
    """One function for each way in which the peers' libraries are called; each call takes `SECONDS` of the clock."""

    clock: FakeClock
    calls: list[str] = field(default_factory=list)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        self.clock.spend(SECONDS)

    def flash_attn_varlen_func(
        self, q, k, v, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, softmax_scale, cu_seqlens_k=None, seqused_k=None,
        block_table=None, causal=False, fa_version=None,
    ):  # fmt: skip
        """That of FlashAttention-3 and -4 and of vLLM, which names its version and takes pages."""
        self._called(f"varlen {fa_version}")
        parts = []
        for seq, (start, stop) in enumerate(zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:], strict=False)):
            if block_table is None:
                begin, end = cu_seqlens_k[seq : seq + 2].tolist()
                keys, values = k[begin:end], v[begin:end]
            else:
                length = int(seqused_k[seq])
                keys, values = (cache[block_table[seq].long()].flatten(0, 1)[:length] for cache in (k, v))
            assert stop - start <= max_seqlen_q and len(keys) <= max_seqlen_k
            assert not causal or stop - start == 1
            parts.append(attend(q[start:stop], keys, values, softmax_scale))
        out = torch.cat(parts)
        return out if fa_version else (out, None)

    def flash_attn_with_kvcache(self, q, k_cache, v_cache, *, cache_seqlens, page_table, softmax_scale):
        self._called("with_kvcache")
        rows = []
        for seq, length in enumerate(cache_seqlens.tolist()):
            keys, values = (cache[page_table[seq].long()].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            rows.append(attend(q[seq], keys, values, softmax_scale))
        return torch.stack(rows)

    # vLLM's operator of FlashAttention-3.

    def get_scheduler_metadata(self, seqs, max_q, max_k, heads, kv_heads, dim, dim_v, dtype, lengths, bounds, *rest):
        assert (max_q, len(rest)) == (1, 13) and bounds.tolist() == list(range(seqs + 1))
        assert lengths.max() == max_k
        return ("plan", heads, kv_heads, dim, dim_v, dtype, rest[4])

    def fwd(self, *arguments):
        assert len(arguments) == 37
        q, k, v, *_ = arguments
        bounds_q, bounds_k, lengths, max_q, max_k, table = (arguments[place] for place in (7, 8, 11, 12, 13, 14))
        scale, causal, plan = arguments[23], arguments[24], arguments[29]
        named = {"max_seqlen_q": max_q, "cu_seqlens_q": bounds_q, "max_seqlen_k": max_k, "softmax_scale": scale}
        if table is not None:
            assert plan == ("plan", q.shape[1], k.shape[2], q.shape[2], v.shape[3], q.dtype, k.shape[1])
        out = self.flash_attn_varlen_func(
            q, k, v, cu_seqlens_k=bounds_k, seqused_k=lengths, block_table=table, causal=causal, **named
        )
        return [out[0], None]


def flashinfer(library: Library) -> ModuleType:
    class Ragged:
        def __init__(self, workspace: torch.Tensor, layout: str) -> None:
            assert layout == "NHD" and workspace.dtype == torch.uint8

        def plan(self, bounds_q, bounds_k, heads, kv_heads, dim, *, head_dim_vo, causal, sm_scale, **dtypes):
            assert not causal
            self.shape = (heads, kv_heads, dim, head_dim_vo)
            self.options = {"cu_seqlens_q": bounds_q, "cu_seqlens_k": bounds_k, "softmax_scale": sm_scale}
            assert set(dtypes) == {"q_data_type", "kv_data_type"}

        def run(self, q, k, v):
            assert self.shape == (q.shape[1], k.shape[1], q.shape[2], v.shape[2])
            return library.flash_attn_varlen_func(q, k, v, max_seqlen_q=10**9, max_seqlen_k=10**9, **self.options)[0]

    class Paged:
        def __init__(self, workspace: torch.Tensor, layout: str, *, use_tensor_cores: bool) -> None:
            self.layout, self.use_tensor_cores = layout, use_tensor_cores

        def plan(self, starts, pages, last, heads, kv_heads, dim, block, *, sm_scale, **dtypes):
            assert starts.dtype == pages.dtype == last.dtype == torch.int32
            self.numbers, self.block, self.scale = (starts.tolist(), pages.long(), last.tolist()), block, sm_scale
            assert self.use_tensor_cores == (heads // kv_heads >= 4)

        def run(self, q, caches):
            library._called(f"paged {self.layout}")
            starts, pages, last = self.numbers
            if self.layout == "HND":
                caches = [cache.transpose(1, 2) for cache in caches]
            rows = []
            for seq, tokens in enumerate(last):
                mine = pages[starts[seq] : starts[seq + 1]]
                length = (len(mine) - 1) * self.block + tokens
                keys, values = (cache[mine].flatten(0, 1)[:length] for cache in caches)
                rows.append(attend(q[seq : seq + 1], keys, values, self.scale)[0])
            return torch.stack(rows)

    return module(
        "flashinfer",
        __version__="0.7.4",
        BatchPrefillWithRaggedKVCacheWrapper=Ragged,
        BatchDecodeWithPagedKVCacheWrapper=Paged,
    )


COMMON_ARGUMENTS = """
    output_ptr query_ptr key_cache_ptr value_cache_ptr sink_ptr block_tables_ptr seq_lens_ptr alibi_slopes_ptr scale
    k_scale v_scale out_scale_inv num_query_heads num_queries_per_kv num_queries_per_kv_padded block_table_stride
    query_stride_0 query_stride_1 output_stride_0 output_stride_1 BLOCK_SIZE PHYSICAL_BLOCK_SIZE HEAD_SIZE
    HEAD_SIZE_PADDED USE_ALIBI_SLOPES SLIDING_WINDOW filter_by_query_len query_start_len_ptr USE_SINKS USE_FP8
    stride_k_cache_0 stride_k_cache_1 stride_k_cache_2 stride_k_cache_3
    stride_v_cache_0 stride_v_cache_1 stride_v_cache_2 stride_v_cache_3
""".split()  # noqa: SIM905


class VllmKernel:
    """`kernel[grid](**arguments)`: reads both caches by the strides that it is passed."""

    def __init__(self, library: Library, split: bool) -> None:
        self.library, self.split = library, split
        self.arg_names = [*COMMON_ARGUMENTS, *(("x", "stride_k_cache_4") if split else ()), "FP8_MIN", "FP8_MAX"]

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(**given: Any) -> None:
            self.library._called("vllm")
            assert set(given) == set(self.arg_names) - {"FP8_MIN", "FP8_MAX"}
            argument = SimpleNamespace(**given)
            kv_heads, dim, block = grid[1], argument.HEAD_SIZE, argument.BLOCK_SIZE
            blocks = argument.value_cache_ptr.shape[0]
            strides = [
                [given[f"stride_{letter}_cache_{place}"] for place in range(5 if self.split and letter == "k" else 4)]
                for letter in "kv"
            ]
            if self.split:
                x = argument.x
                keys = torch.as_strided(argument.key_cache_ptr, (blocks, kv_heads, dim // x, block, x), strides[0])
                keys = keys.transpose(2, 3).flatten(3)
                values = torch.as_strided(argument.value_cache_ptr, (blocks, kv_heads, dim, block), strides[1])
                values = values.transpose(2, 3)
            else:
                shape = (blocks, kv_heads, block, dim)
                caches = (argument.key_cache_ptr, argument.value_cache_ptr)
                keys, values = (torch.as_strided(*pair) for pair in zip(caches, (shape, shape), strides, strict=True))
            for seq in range(grid[0]):
                pages, length = argument.block_tables_ptr[seq].long(), int(argument.seq_lens_ptr[seq])
                seen = (cache[pages].transpose(1, 2).flatten(0, 1)[:length] for cache in (keys, values))
                query = argument.query_ptr[seq : seq + 1]
                argument.output_ptr[seq] = attend(query, *seen, argument.scale)[0]

        return launch


@dataclass
class FakePeer:
    """A peer by what `change` makes of the right answer at its call number `count`; what it raises, the peer raises."""

    clock: FakeClock
    change: Callable[[torch.Tensor, int], torch.Tensor] = lambda out, count: out
    seconds: float = 2e-4
    refusal: Exception | None = None
    name: str = "fake"
    origin: str = "a test"
    count: int = 0
    log: list[str] = field(default_factory=list)

    def bind(self, work: Work) -> Attention:
        if self.refusal is not None:
            raise self.refusal
        spec = work.spec
        axes = ("q_token" if spec.family == "prefill" else "seq", "head", "dim")

        right = to_logical(oracle(spec, work.inputs)[0], spec.out_layout, axes).to(work.query.dtype)

        def attention() -> torch.Tensor:
            self.log.append(self.name)
            self.clock.spend(self.seconds)
            self.count += 1
            return self.change(right.clone(), self.count - 1)

        return attention
