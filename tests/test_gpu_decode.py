"""What only a GPU shows of the paged Hopper kernels: right results in every layout, way of sharing and adversity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch

from dsl.check import load_spec
from dsl.load import load
from dsl.pipeline import build
from dsl.source import Source
from dsl.spec import Layout, Spec

pytestmark = pytest.mark.gpu

TEXT = """
attention x_split { query = single  kv = paged(block = 16)  dtype = bf16  heads = 32 / 8  head_dim = 128
    k_cache = [block, kv_head, dim/8, slot, dim%8]  v_cache = [block, kv_head, dim, slot]  lse = true }
attention alone from x_split { heads = 5 / 5  dtype = fp16  lse = false }
attention seven from x_split { heads = 14 / 2 }
attention wide from x_split { heads = 16 / 2  head_dim = 256 }
attention fixed from x_split { split = fixed(128) }
attention whole from x_split { split = none }
attention pages_64 from x_split { kv = paged(block = 64) }
attention pages_24 from x_split { kv = paged(block = 24)  head_dim = 72  heads = 7 / 1 }
attention pages_544 from x_split { kv = paged(block = 544)  heads = 7 / 1  head_dim = 64 }
attention nhd from x_split { k_cache = [block, slot, kv_head, dim]  v_cache = [block, slot, kv_head, dim] }
attention nhd_48 from nhd { kv = paged(block = 48)  head_dim = 80  dtype = fp16 }
attention hnd_8 from nhd { kv = paged(block = 8)  head_dim = 96 / 64  heads = 14 / 2
    k_cache = [block, kv_head, slot, dim]  v_cache = [block, kv_head, slot, dim] }
attention hnd_32 from hnd_8 { kv = paged(block = 32)  head_dim = 192 / 128 }
attention shuffled from x_split { v_cache = [block, kv_head, slot/8, dim, slot%8] }
attention slots_last from x_split { kv = paged(block = 32)  head_dim = 112
    k_cache = [block, kv_head, dim, slot]  v_cache = [block, kv_head, dim/16, slot, dim%16] }
"""
SPECS: dict[str, Spec] = {spec.name: spec for spec in load_spec(Source.from_text(TEXT, "attend.attn")).attentions}
LENGTHS = (0, 1, 15, 16, 17, 33, 64, 100, 127, 128, 700, 0, 3, 2000)
SHORT, TINY = (0, 1, 120, 128, 64, 33), (0, 5, 60, 64, 1)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEAD_PAGE = 2**30


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernels run on sm90")
    path = tmp_path_factory.mktemp("gpu") / "attend.attn"
    path.write_text(TEXT)
    return load(build(path, path.parent))


def in_layout(cache: torch.Tensor, layout: Layout, interleaved: bool) -> torch.Tensor:
    """[block, slot, kv_head, dim] in a spec's axes; interleaved: a view of every other page, with NaN between them."""
    axes, shape, order = ("block", "slot", "kv_head", "dim"), [], []
    for name, size in zip(axes, cache.shape, strict=True):
        factor = next((axis.factor for axis in layout if axis.name == name and axis.part == "inner"), None)
        shape += [size] if factor is None else [size // factor, factor]
        order += [(name, "whole")] if factor is None else [(name, "outer"), (name, "inner")]
    moved = cache.reshape(shape).permute([order.index((axis.name, axis.part)) for axis in layout]).contiguous()
    if not interleaved:
        return moved
    pages = layout.index(next(axis for axis in layout if axis.name == "block"))
    both = torch.stack((moved, torch.full_like(moved, float("nan"))), pages + 1)
    return both.select(pages + 1, 0)


class Batch:
    """Inputs of a block whose dead slots hold NaN and whose dead table entries point nowhere, and what is right."""

    def __init__(self, spec: Spec, lengths: Sequence[int], width: int = 0, views: bool = False, seed: int = 0) -> None:
        torch.manual_seed(seed)
        assert spec.block
        block, dtype, device = spec.block, DTYPES[spec.dtype], "cuda"
        counts = [-(-length // block) for length in lengths]
        pages = sum(counts) + 3
        keys = torch.randn(pages, block, spec.kv_heads, spec.head_dim_qk, device=device).to(dtype)
        values = torch.randn(pages, block, spec.kv_heads, spec.head_dim_v, device=device).to(dtype)
        order = torch.randperm(pages, device=device)
        table = torch.full((len(lengths), max(width, *counts, 1)), DEAD_PAGE, device=device, dtype=torch.int32)
        dead, taken = torch.ones(pages, block, dtype=torch.bool, device=device), 0
        for seq, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            own = order[taken : taken + count]
            taken += count
            table[seq, :count] = own.int()
            dead[own] = torch.arange(count * block, device=device).view(-1, block) >= length
        keys[dead] = values[dead] = float("nan")
        heads = 2 * spec.heads if views else spec.heads
        query = torch.randn(len(lengths), heads, spec.head_dim_qk, device=device).to(dtype)[:, : spec.heads]
        self.spec, self.lengths, self.logical = spec, lengths, (query, keys, values, table)
        self.arguments = (
            query,
            in_layout(keys, spec.k_layout, views),
            in_layout(values, spec.v_layout, views),
            table.long() if views else table,
            torch.tensor(lengths, dtype=torch.int64 if views else torch.int32, device=device),
        )
        out = torch.full((len(lengths), heads, spec.head_dim_v), float("nan"), device=device, dtype=dtype)
        self.results = {"out": out[:, : spec.heads]}
        if spec.lse:
            self.results["out_lse"] = torch.full((spec.heads, len(lengths)), float("nan"), device=device)

    def check(self) -> None:
        """Compare the results with attention in float32."""
        query, keys, values, table = self.logical
        spec, out = self.spec, self.results["out"].float()
        limit = 6e-3 if spec.dtype == "bf16" else 1e-3
        for seq, length in enumerate(self.lengths):
            if length == 0:
                assert not out[seq].any(), f"sequence {seq} sees nothing"
                continue
            own = table[seq, : -(-length // spec.block)].long()  # type: ignore[operator]
            key, value = (
                cache[own].flatten(0, 1)[:length].float().repeat_interleave(spec.group, 1) for cache in (keys, values)
            )
            scores = torch.einsum("hd,nhd->hn", query[seq].float(), key) * spec.head_dim_qk**-0.5
            right = torch.einsum("hn,nhd->hd", scores.softmax(-1), value)
            error = ((out[seq] - right).norm() / right.norm()).item()
            assert error < limit, f"sequence {seq} of {length} keys is off by {error}"
            if spec.lse:
                assert torch.allclose(self.results["out_lse"][:, seq], scores.logsumexp(-1), atol=2e-3)
        if spec.lse:
            empty = [seq for seq, length in enumerate(self.lengths) if length == 0]
            assert (self.results["out_lse"][:, empty] == -math.inf).all()


def run(module: ModuleType, batch: Batch) -> None:
    pages = module._pages(getattr(module, f"_{batch.spec.name}_block"), *batch.arguments[1:3])
    assert pages is not None, "the portable kernel would run"
    getattr(module, batch.spec.name)(*batch.arguments, **batch.results)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    "lengths", [LENGTHS, SHORT, TINY, (0, 0, 0), (1,)], ids=["long", "short", "tiny", "none", "one"]
)
def test_every_layout(module: ModuleType, name: str, lengths: Sequence[int]):
    batch = Batch(SPECS[name], lengths)
    run(module, batch)
    batch.check()


@pytest.mark.parametrize("name", SPECS)
def test_views_and_wide_indices(module: ModuleType, name: str):
    batch = Batch(SPECS[name], LENGTHS[::-1], views=True)
    run(module, batch)
    batch.check()


@pytest.mark.parametrize("name", ["x_split", "alone", "seven", "wide", "pages_64", "pages_24", "nhd", "hnd_8"])
@pytest.mark.parametrize(
    ("way", "programs", "merged"), [("balanced", 37, "few"), ("balanced", 900, "many"), ("whole", 0, "")]
)
def test_every_way_of_sharing(
    module: ModuleType, name: str, way: str, programs: int, merged: str, monkeypatch: pytest.MonkeyPatch
):
    for stages in getattr(module, f"_{name}_block").paged.stages:
        batch = Batch(SPECS[name], LENGTHS * 3, width=300, seed=stages)
        share = module._Share(way, programs or len(batch.lengths) * SPECS[name].kv_heads, 1, stages, "", merged)
        monkeypatch.setattr(
            module, "_share_keys", lambda *a, share=share: share._replace(parts=1 + (way == "balanced"))
        )
        run(module, batch)
        batch.check()


def test_fixed_parts_give_the_same_bits_in_any_batch(module: ModuleType):
    spec = SPECS["fixed"]
    batch = Batch(spec, LENGTHS, width=300)
    run(module, batch)
    query, keys, values, table, lengths = batch.arguments
    for seq, length in enumerate(LENGTHS):
        width = max(1, -(-length // 16))
        out, lse = module.fixed(
            query[seq : seq + 1], keys, values, table[seq : seq + 1, :width], lengths[seq : seq + 1]
        )
        assert torch.equal(out[0], batch.results["out"][seq])
        assert torch.equal(lse[:, 0], batch.results["out_lse"][:, seq])


@pytest.mark.parametrize("lengths", [LENGTHS, SHORT], ids=["long", "short"])
def test_a_graph_after_warmup(module: ModuleType, lengths: Sequence[int]):
    batch = Batch(SPECS["x_split"], lengths)
    module.x_split.warmup(*batch.arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module.x_split(*batch.arguments, **batch.results)
    for _ in range(3):
        for result in batch.results.values():
            result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        batch.check()


def test_two_streams_at_once(module: ModuleType):
    batches = [Batch(SPECS["x_split"], LENGTHS * 4, seed=seed) for seed in range(2)]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    for _ in range(20):
        for batch, stream in zip(batches, streams, strict=True):
            with torch.cuda.stream(stream):
                run(module, batch)
    torch.cuda.synchronize()
    for batch in batches:
        batch.check()
