"""The paged Hopper kernels: which blocks have them, what they compile to, how keys are shared out, when they run."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dsl.architecture import architecture
from dsl.check import load_spec
from dsl.compile import CompiledKernel, compile_module
from dsl.explain import explain
from dsl.load import load
from dsl.plan import ModulePlan, plan_module
from dsl.plan.cost import decode_share
from dsl.plan.decode_hopper import LEAST_TILES
from dsl.render import render
from dsl.source import Source
from tests.conftest import ROOT

X_SPLIT = {"k_cache": "[block, kv_head, dim/8, slot, dim%8]", "v_cache": "[block, kv_head, dim, slot]"}
SHUFFLED = {**X_SPLIT, "v_cache": "[block, kv_head, slot/8, dim, slot%8]"}
HND = {"k_cache": "[block, kv_head, slot, dim]", "v_cache": "[block, kv_head, slot, dim]"}
SLOT_LAST = {"k_cache": "[block, kv_head, dim, slot]", "v_cache": "[block, kv_head, dim/16, slot, dim%16]"}
FIELDS = {"query": "single", "kv": "paged(block = 16)", "dtype": "bf16", "heads": "8 / 2", "head_dim": "128"}
PROCESSORS = 132


def plan_of(*targets: str, **fields: str) -> ModulePlan:
    text = " ".join(f"{name} = {value}" for name, value in {**FIELDS, **fields}.items())
    return plan_module(load_spec(Source.from_text(f"attention attend {{ {text} }}", "attend.attn")), targets or None)


def module_of(folder: Path, plan: ModulePlan) -> ModuleType:
    path = folder / "attend.py"
    path.write_text(render(plan))
    return load(path)


# Which blocks have them.


def test_a_block_has_all_kernels():
    names = ["_decode_kernel", "_merge_kernel", "_decode_hopper_kernel"]
    assert {*names, "_decode_registers_kernel", "_decode_hopper_merge_kernel"} == {k.name for k in plan_of().kernels}
    assert {kernel.name for kernel in plan_of(split="none").kernels} == {"_decode_kernel", "_decode_hopper_kernel"}
    fixed = {kernel.name for kernel in plan_of(split="fixed(64)").kernels}
    assert fixed == {*names, "_decode_hopper_merge_kernel"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "fp32"}, "it computes in bf16 and fp16"),
        ({"head_dim": "264"}, "its head_dim is at most 256"),
        ({"heads": "34 / 2"}, "at most 16 query heads share a KV head"),
        ({"targets": "[portable]"}, "`targets` leaves it out"),
        ({"k_cache": "[block, slot, dim, kv_head]"}, "k_cache is contiguous along kv_head"),
        ({"k_cache": "[block, kv_head, dim/4, slot, dim%4]", "kv": "paged(block = 1)"}, "less than 16 bytes"),
        ({"kv": "paged(block = 1)"}, "k_cache has 2 rows of 128 bytes in a box, fewer than 8"),
        ({**X_SPLIT, "kv": "paged(block = 12)"}, "v_cache is contiguous in runs of less than 16 bytes"),
        (
            {"k_cache": "[block, kv_head, dim/12, slot, dim%12]", "head_dim": "96"},
            "runs of 12, which is no power of two",
        ),
        ({**SHUFFLED, "kv": "paged(block = 12)", "v_cache": "[block, kv_head, slot/4, dim, slot%4]"}, None),
    ],
    ids=lambda value: None if isinstance(value, str | None) else "-".join(value),
)
def test_a_block_without_them_says_why(fields: dict[str, str], reason: str | None):
    plan = plan_of(**fields)
    if reason is None:
        assert plan.has_decode_hopper
        return
    assert not plan.has_decode_hopper
    assert reason in " ".join(explain(plan.file).split())
    assert "gluon" not in render(plan)


def test_a_build_may_leave_them_out():
    assert "gluon" not in render(plan_of("portable"))
    assert "gluon" in render(plan_of("portable", "hopper"))


def test_short_contexts_need_powers_of_two():
    assert plan_of(**X_SPLIT).blocks[0].decode_hopper.registers  # type: ignore[union-attr]
    for fields in ({"head_dim": "96"}, {"head_dim": "128 / 64"}, {"split": "fixed(64)"}, {"kv": "paged(block = 4)"}):
        assert plan_of(**fields).blocks[0].decode_hopper.registers is None  # type: ignore[union-attr]


# What they compile to.

SHAPES: list[dict[str, str]] = [
    X_SPLIT,
    {**X_SPLIT, "head_dim": "256", "dtype": "fp16", "lse": "true"},
    {**X_SPLIT, "kv": "paged(block = 24)", "head_dim": "72", "heads": "7 / 1"},
    {"lse": "true", "split": "fixed(128)"},
]
MORE_SHAPES: list[dict[str, str]] = [
    {**X_SPLIT, "kv": "paged(block = 64)"},
    {**X_SPLIT, "kv": "paged(block = 544)", "head_dim": "64"},
    SHUFFLED,
    {**SHUFFLED, "kv": "paged(block = 64)", "head_dim": "64"},
    {**HND, "kv": "paged(block = 8)", "head_dim": "96 / 64", "lse": "true"},
    {**HND, "kv": "paged(block = 32)", "head_dim": "192 / 128"},
    {**HND, "head_dim": "256", "lse": "true"},
    {**SLOT_LAST, "kv": "paged(block = 32)", "head_dim": "112"},
    {"kv": "paged(block = 48)", "head_dim": "80", "split": "none"},
]


MOST_SPILLS = 128
"""Bytes that a thread may keep in memory at head_dim 256: queries and the result alone take 192 registers."""


def compiled(folder: Path, **fields: str) -> list[CompiledKernel]:
    plan = plan_of(**fields)
    module_of(folder, plan)
    ours = {kernel.name for kernel in plan.blocks[0].decode_hopper.kernels}  # type: ignore[union-attr]
    kernels = compile_module(plan, folder / "attend.py", architecture("sm90"))
    return [kernel for kernel in kernels if kernel.launch.kernel.name in ours]


@pytest.mark.compile
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    "fields",
    [*SHAPES, *(pytest.param(fields, marks=pytest.mark.slow) for fields in MORE_SHAPES)],
    ids=lambda fields: "-".join(re.sub(r"\W+", "_", value) for value in fields.values()) or "default",
)
def test_tiles_reach_the_products_without_a_detour(fields: dict[str, str], tmp_path: Path):
    for kernel in compiled(tmp_path, **fields):
        launch, code = kernel.launch, kernel.compiled.code
        assert kernel.fits and kernel.within_plan, launch.variant
        assert kernel.compiled.spill_bytes <= (MOST_SPILLS if fields.get("head_dim") == "256" else 0), launch.variant
        numbers = launch.constants
        if "STAGES" in numbers:
            # Four 8 x 8 matrices a load, two loads for each 16 x 16 piece of a tile of keys and of one of values.
            wanted = numbers["TILE"] * (numbers["QK_PADDED"] + numbers["V_PADDED"]) // 256  # type: ignore[operator]
            assert len(re.findall(r"ldmatrix\S*\.x4", code)) == wanted, launch.variant
            assert not re.search(r"(ld|st)\.shared", code), launch.variant
        if "TOKENS" in numbers:
            wide = numbers["TOKENS"] * numbers["HEAD_DIM"] * 2 // 512  # type: ignore[operator]
            assert len(re.findall(r"ld\.global\S*v4", code)) >= wide, launch.variant


# How keys are shared out.


@pytest.fixture(scope="module")
def decode() -> ModuleType:
    return load(ROOT / "generated" / "decode.py")


@pytest.mark.parametrize(
    "fields", [X_SPLIT, {**X_SPLIT, "head_dim": "256"}, {"split": "fixed(128)"}, {"split": "none"}]
)
@pytest.mark.parametrize("capacity", [16, 64, 128, 1024, 8192, 131072])
def test_the_launcher_shares_as_explained(fields: dict[str, str], capacity: int, tmp_path: Path, monkeypatch: Any):
    plan = plan_of(**fields)
    module = module_of(tmp_path, plan)
    monkeypatch.setattr(module, "_architecture", lambda device: ("sm90", PROCESSORS))
    block, paged = module._attend_block, plan.blocks[0].decode_hopper
    assert paged
    pages = SimpleNamespace(registers=paged.registers is not None)
    for seqs in (1, 4, 32, 100, 512, 5000):
        share = module._share_decode(block, pages, seqs, capacity // 16, torch.device("cpu"))
        assert tuple(share) == tuple(vars_of(decode_share(paged, seqs * 2, capacity, PROCESSORS)))
        assert share.way == "registers" or share.stages in paged.stages
        assert share.parts == 1 or share.merged in paged.merge_shapes


def vars_of(share: object) -> list[object]:
    return [getattr(share, name) for name in ("way", "programs", "parts", "stages", "kind", "merged")]


@pytest.mark.parametrize("seed", range(40))
def test_equal_shares_meet_every_tile_once(seed: int):
    """What the kernel and its merge compute from the lengths, in whole numbers."""
    draw = random.Random(seed)
    kv_heads, tile = draw.choice([1, 3, 8]), 16
    lengths = [draw.choice([0, 1, 16, 17, draw.randrange(5000)]) for _ in range(draw.randrange(1, 40))]
    tiles = [-(-length // tile) for length in lengths]
    total, launched = sum(tiles) * kv_heads, draw.choice([1, 7, 96, 792])
    programs = min(launched, -(-total // LEAST_TILES))
    written: dict[tuple[int, int], list[tuple[int, int]]] = {}
    whole: list[tuple[int, int]] = []
    for program in range(programs):
        place, end = (first_tile(number, programs, total) for number in (program, program + 1))
        assert place < end
        seq, start = 0, 0
        while start + tiles[seq] * kv_heads <= place:
            start += tiles[seq] * kv_heads
            seq += 1
        while place < end:
            if tiles[seq]:
                kv_head = (place - start) // tiles[seq]
                first = place - start - kv_head * tiles[seq]
                stop = min(first + end - place, tiles[seq])
                if first == 0 and stop == tiles[seq]:
                    whole.append((seq, kv_head))
                else:
                    slot = 2 * program + (first == 0)
                    assert slot not in [other for parts in written.values() for other, _ in parts]
                    written.setdefault((seq, kv_head), []).append((slot, stop - first))
                place += stop - first
            if place == start + kv_heads * tiles[seq]:
                start, seq = place, seq + 1
    start = 0
    for seq, count in enumerate(tiles):
        for kv_head in range(kv_heads):
            begin = start + kv_head * count
            first = ((begin + 1) * programs - 1) // max(total, 1)
            last = ((begin + count) * programs - 1) // max(total, 1)
            parts = last - first + 1 if count else 0
            if parts == 1:
                assert whole.count((seq, kv_head)) == 1 and (seq, kv_head) not in written
            else:
                slots = [(first + part) * 2 + (part == 0) for part in range(parts)]
                found = written.get((seq, kv_head), [])
                assert [slot for slot, _ in found] == slots and sum(size for _, size in found) == count
        start += kv_heads * count


def first_tile(program: int, programs: int, tiles: int) -> int:
    """As the kernel computes it, without large numbers."""
    place = tiles // programs * program + tiles % programs * program // programs
    assert place == program * tiles // programs
    return place


def test_equal_sequences_are_cut_into_equal_parts():
    for parts in range(1, 9):
        starts = [first_tile(program, 12 * parts, 12 * 512) for program in range(12 * parts)]
        assert starts[::parts] == list(range(0, 12 * 512, 512))


# When they run.


def caches(pages: int = 20, kv_heads: int = 4, dim: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.zeros(pages, kv_heads, dim // 8, 16, 8, dtype=torch.bfloat16)
    return keys, torch.zeros(pages, kv_heads, dim, 16, dtype=torch.bfloat16)


def test_the_launcher_takes_them_where_they_run(decode: ModuleType, monkeypatch: pytest.MonkeyPatch):
    block, chip, device = decode._bf16_32_4_block, SimpleNamespace(name="sm90"), torch.device("cpu")
    monkeypatch.setattr(decode, "_INTERPRETED", False)
    monkeypatch.setattr(decode, "_architecture", lambda device: (chip.name, PROCESSORS))
    assert decode._paged_target(block, device, 16, 128, 8) == "hopper"
    assert decode._paged_target(block, device, 16, 128, 1) == "portable"
    assert decode._paged_target(block, device, 2**20, 2**16, 8) == "portable"
    assert decode._paged_target(block._replace(paged=None), device, 16, 128, 8) == "portable"
    monkeypatch.setattr(decode, "_TRITON", (3, 5))
    assert decode._paged_target(block, device, 16, 128, 8) == "portable"
    monkeypatch.setattr(decode, "_TRITON", (3, 6))
    chip.name = "sm100"
    assert decode._paged_target(block, device, 16, 128, 8) == "portable"


def test_pages_that_boxes_cannot_span(decode: ModuleType):
    block = decode._bf16_32_4_block
    keys, values = caches()
    pages = decode._pages(block, keys, values)
    assert pages.registers and pages.maps.keys() == block.paged.maps.keys()
    assert decode._pages(block, keys, values) is pages
    # A map keeps no tensor alive.
    assert not any(isinstance(value, torch.Tensor) for made in pages.maps.values() for value in vars(made).values())
    interleaved = torch.zeros(20, 2, *values.shape[1:], dtype=values.dtype)[:, 0]
    assert decode._pages(block, keys, interleaved).registers
    gaps = torch.zeros(20, 4, 128, 32, dtype=values.dtype)[..., :16]
    assert decode._pages(block, keys, gaps) is None
    assert decode._pages(block, keys[:1].expand(20, -1, -1, -1, -1), values) is None
    assert decode._pages(block, keys[:0], values[:0]) is None
    decode._pages_known.update(dict.fromkeys(range(4096)))
    assert decode._pages(block, keys[1:], values[1:]) and len(decode._pages_known) == 1


def test_gaps_that_only_boxes_span(tmp_path: Path):
    """TMA reads slots with gaps between them; the kernel for short contexts takes pages without."""
    module = module_of(tmp_path, plan_of(**HND))
    keys = torch.zeros(20, 2, 16, 128, dtype=torch.bfloat16)
    wide = torch.zeros(20, 2, 16, 256, dtype=torch.bfloat16)[..., :128]
    assert module._pages(module._attend_block, keys, keys.clone()).registers
    assert not module._pages(module._attend_block, keys, wide).registers


@pytest.mark.parametrize("seqs", [1, 4, 300])
@pytest.mark.parametrize("width", [4, 8, 2048])
@pytest.mark.parametrize("split", ["auto", "none", "fixed(128)"])
def test_a_launch_names_every_argument(seqs: int, width: int, split: str, tmp_path: Path, monkeypatch: Any):
    """Each kernel gets each of its arguments once, and nothing else but options."""
    module = module_of(tmp_path, plan_of(**X_SPLIT, split=split, lse="true"))
    launched: list[str] = []
    monkeypatch.setattr(module, "_INTERPRETED", False)
    monkeypatch.setattr(module, "_architecture", lambda device: ("sm90", PROCESSORS))
    monkeypatch.setattr(module, "_check_device", lambda block, device: None)
    paged = module._attend_block.paged
    fakes = {
        name: Launches(getattr(paged, name), launched)
        for name in ("kernel", "merge", "registers")
        if getattr(paged, name) is not None
    }
    monkeypatch.setattr(module, "_attend_block", module._attend_block._replace(paged=paged._replace(**fakes)))
    query = torch.zeros(seqs, 8, 128, dtype=torch.bfloat16)
    table = torch.zeros(seqs, width, dtype=torch.int32)
    module.attend(query, *caches(kv_heads=2), table, torch.zeros(seqs, dtype=torch.int32))
    assert launched and launched[0] in ("_decode_hopper_kernel", "_decode_registers_kernel")
    assert len(launched) == 1 or launched[1:] == ["_decode_hopper_merge_kernel"]


class Launches:
    """A kernel that checks what it is called with, and notes its name."""

    OPTIONS = ("num_warps", "launch_pdl", "enable_fp_fusion")

    def __init__(self, kernel: Any, launched: list[str]) -> None:
        self.arg_names, self.name, self.launched = kernel.arg_names, kernel.__name__, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*given: object, **named: object) -> None:
            names = [*self.arg_names[: len(given)], *(name for name in named if name not in self.OPTIONS)]
            assert sorted(names) == sorted(self.arg_names)
            assert all(size > 0 for size in grid)
            self.launched.append(self.name)

        return launch
