"""The tiles that `tune` tries: a short list for each family, always the same."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from dsl.architecture import Architecture
from dsl.layout import contiguous_slots
from dsl.plan import decode, paged, prefill
from dsl.plan.module import Config
from dsl.spec import Spec


def candidates(spec: Spec, chip: Architecture) -> tuple[Config, ...]:
    """All candidates of a block's family, whether they fit the chip or not."""
    return tuple({"decode": _decode, "prefill": _prefill, "paged": _paged}[spec.family](spec, chip))


def _decode(spec: Spec, chip: Architecture) -> Iterator[Config]:
    tiles = (16, 32, 64) if spec.dtype == "fp32" else (16, 32, 64, 128)
    for tile, warps in product(tiles, (1, 2, 4, 8)):
        constants = {"TILE": tile, **_chunk(spec, tile)}
        yield Config(constants, warps, 1, decode.shared_bytes(spec, constants, 1))


def _chunk(spec: Spec, tile: int) -> dict[str, int]:
    """The slots that one load takes where a cache is contiguous along them."""
    assert spec.block is not None
    layouts = [layout for layout in (spec.k_layout, spec.v_layout) if layout[-1].name == "slot"]
    return {"CHUNK": min(tile, *(contiguous_slots(layout, spec.block) for layout in layouts))} if layouts else {}


def _prefill(spec: Spec, chip: Architecture) -> Iterator[Config]:
    rows, columns = ((32, 64), (16, 32)) if spec.dtype == "fp32" else ((64, 128), (32, 64, 128))
    stages = (1, 2) if chip.is_amd else (1, 2, 3, 4)
    for block_q, block_kv, row_parts, num_warps, num_stages in product(rows, columns, (1, 8), (4, 8), stages):
        constants = prefill.tiles(block_q, block_kv, row_parts)
        yield Config(constants, num_warps, num_stages, prefill.shared_bytes(spec, constants, num_stages, chip))


def _paged(spec: Spec, chip: Architecture) -> Iterator[Config]:
    rows, keys = ((32, 64), (16, 32)) if spec.dtype == "fp32" else ((32, 64, 128), (16, 32, 64, 128))
    stages = (1,) if chip.is_amd else (1, 2, 3)
    for block_q, tile, num_warps, num_stages in product(rows, keys, (4, 8), stages):
        constants = paged.tiles(spec, block_q, tile)
        yield Config(constants, num_warps, num_stages, paged.shared_bytes(spec, constants, num_stages, chip))
