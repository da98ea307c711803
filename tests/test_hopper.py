"""The Hopper kernel: which blocks have one, what it compiles to, and when a launcher takes it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsl.architecture import architecture
from dsl.check import load_spec
from dsl.compile import compile_module
from dsl.explain import explain
from dsl.load import load
from dsl.plan import ModulePlan, plan_module
from dsl.render import render
from dsl.source import Source
from tests.conftest import ROOT

FIELDS = {"query": "packed", "kv": "packed", "dtype": "bf16", "heads": "8 / 2", "head_dim": "72"}


def plan_of(*targets: str, **fields: str) -> ModulePlan:
    text = " ".join(f"{name} = {value}" for name, value in {**FIELDS, **fields}.items())
    return plan_module(load_spec(Source.from_text(f"attention attend {{ {text} }}", "attend.attn")), targets or None)


def test_a_block_has_both_kernels():
    names = ["_prefill_kernel", "_prefill_hopper_kernel", "_prefill_merge_kernel"]
    assert [kernel.name for kernel in plan_of().kernels] == names


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "fp32"}, "bf16 and fp16"),
        ({"head_dim": "264"}, "at most 256"),
        ({"head_dim": "128 / 264"}, "at most 256"),
        ({"scale": "-1.0"}, "must be positive"),
        ({"targets": "[portable]"}, "`targets` leaves it out"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_a_block_without_one_says_why(fields: dict[str, str], reason: str):
    plan = plan_of(**fields)
    assert [kernel.name for kernel in plan.kernels] == ["_prefill_kernel"]
    assert reason in " ".join(explain(plan.file).split())
    assert "gluon" not in render(plan)


def test_a_build_may_leave_it_out():
    assert "gluon" not in render(plan_of("portable"))
    assert "gluon" in render(plan_of("portable", "hopper"))


DEFAULT_DIMS, OTHER_DIMS = ("72", "128"), ("8", "40", "64", "80", "96", "112", "136", "192", "200", "256", "192 / 128")
MOST_SPILLS = 128
"""Bytes that a thread may keep in memory where values have more than 128 columns."""


@pytest.mark.compile
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("dim", [*DEFAULT_DIMS, *(pytest.param(dim, marks=pytest.mark.slow) for dim in OTHER_DIMS)])
@pytest.mark.parametrize("fields", [{}, {"dtype": "fp16", "lse": "true"}], ids=["bf16", "fp16 lse"])
def test_no_spills_and_wgmma_in_flight(
    dim: str, fields: dict[str, str], tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    monkeypatch.setattr(triton.knobs.nvidia, "dump_ptxas_log", True)
    plan = plan_of(head_dim=dim, **fields)
    path = tmp_path / "attend.py"
    path.write_text(render(plan))
    kernels = compile_module(plan, path, architecture("sm90"))
    (kernel,) = (kernel for kernel in kernels if kernel.launch.kernel.name == "_prefill_hopper_kernel")
    assert kernel.fits and kernel.within_plan
    assert kernel.compiled.spill_bytes <= (MOST_SPILLS if plan.blocks[0].spec.head_dim_v > 128 else 0)
    # What ptxas says where it cannot keep a wgmma in flight.
    assert "wgmma.mma_async instructions are serialized" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("fields", "speculates"),
    [({}, True), ({"softmax": "online"}, False), ({"dtype": "fp16"}, False)],
    ids=["auto", "online", "fp16"],
)
def test_which_softmax_is_computed(fields: dict[str, str], speculates: bool):
    plan = plan_of(**fields)
    assert ("is the softmax's offset" in " ".join(explain(plan.file).split())) == speculates
    assert ("failures" in render(plan)) == speculates


@pytest.mark.parametrize(
    ("rows", "sequences", "height", "splits"),
    [
        (276, 4, 1, 1),  # 20 low tiles rather than 8 high ones: each processor has less to do
        (4100, 4, 2, 1),  # 132 tiles for 132 processors
        (2116, 16, 3, 2),  # a round of 132 tiles and 60 that are cut in two
        (1, 8, 1, 1),
    ],
)
def test_how_programs_share_tiles(rows: int, sequences: int, height: int, splits: int):
    module = load(ROOT / "generated" / "prefill.py")
    blocks = -(-rows // 128)
    assert module._plan_tiles(rows, blocks, sequences, 3, 132)[1:] == (height, splits)


@pytest.mark.parametrize("q_tokens", [1, 64, 1000, 8136])
@pytest.mark.parametrize("num_seqs", [0, 1, 3, 400])
def test_items_are_tiles_and_splits_and_spare_slots(q_tokens: int, num_seqs: int, monkeypatch: pytest.MonkeyPatch):
    module = load(ROOT / "generated" / "prefill.py")
    monkeypatch.setattr(module, "_architecture", lambda device: ("sm90", 132))
    block = module._bf16_16_72_block
    work = module._share_out(block, q_tokens, q_tokens, num_seqs, torch.device("cpu"))
    tiles = work.whole_tiles + work.split_tiles
    run = work.head_slots * block.heads
    slots = [
        (tile % run // work.head_slots, tile // run * work.head_slots + tile % work.head_slots) for tile in range(tiles)
    ]
    assert len(set(slots)) == tiles
    assert set(slots) >= {(head, slot) for head in range(block.heads) for slot in range(work.slots)}
    assert tiles < (work.slots + work.head_slots) * block.heads
    assert work.items == work.whole_tiles + work.split_tiles * work.num_splits + 2 * block.heads
    assert work.programs == min(work.items, 132)
    assert work.slots + 2 >= -(-q_tokens // (64 * work.height)) + num_seqs + 1 or work.slots == 1
    assert work.num_splits == 1 or work.num_splits <= module._SPLITS[-1]


def test_tensor_maps_are_made_once_for_the_same_memory():
    module = load(ROOT / "generated" / "prefill.py")
    block, axes = module._bf16_16_72_block, ((0, 1),) * 3
    q, k, v = (torch.zeros(20, 16, 72, dtype=torch.bfloat16) for _ in "qkv")
    first = module._tensor_maps(block, (q, k, v), axes)
    assert module._tensor_maps(block, (q, k, v), axes) is first
    assert first.keys() == block.hopper_boxes.keys()
    assert [first[name].base.data_ptr() for name in ("q_map_0", "k_map_1", "v_map")] == [
        t.data_ptr() for t in (q, k, v)
    ]
    for changed in ((q[1:], k, v), (q, k[:19], v), (q, k, torch.zeros(20, 16, 80, dtype=torch.bfloat16)[:, :, :72])):
        assert module._tensor_maps(block, changed, axes) is not first
    # A map keeps no tensor alive.
    assert not any(isinstance(value, torch.Tensor) for made in first.values() for value in vars(made).values())
    module._tensor_maps_made.update({number: {} for number in range(4096)})
    assert module._tensor_maps(block, (q[2:], k, v), axes) and len(module._tensor_maps_made) == 1


def test_the_launcher_takes_it_where_it_runs(monkeypatch: pytest.MonkeyPatch):
    module = load(ROOT / "generated" / "prefill.py")
    block = module._bf16_16_72_block
    chip = SimpleNamespace(name="sm90")
    monkeypatch.setattr(module, "_INTERPRETED", False)
    monkeypatch.setattr(module, "_architecture", lambda device: (chip.name, 132))
    q, k, v = (torch.empty(20, 16, 72, dtype=torch.bfloat16) for _ in "qkv")
    assert module._target(block, q, k, v, 1, 8) == "hopper"
    assert module._target(block, q, k, v, 1, 1) == "portable"
    assert module._target(block, q, k[:0], v[:0], 1, 8) == "portable"
    assert module._target(block, q, k[:1].expand(20, -1, -1), v, 1, 8) == "portable"
    assert module._target(block, q, k, v, 2**24, 8) == "portable"
    assert module._target(block._replace(hopper=None), q, k, v, 1, 8) == "portable"
    monkeypatch.setattr(module, "_TRITON", (3, 5))
    assert module._target(block, q, k, v, 1, 8) == "portable"
    monkeypatch.setattr(module, "_TRITON", (3, 6))
    chip.name = "sm100"
    assert module._target(block, q, k, v, 1, 8) == "portable"


def test_more_tokens_than_one_launch_takes() -> None:
    """Their numbers would leave 32 bits."""
    module = load(ROOT / "generated" / "prefill.py")
    token = torch.zeros(72, dtype=torch.bfloat16)
    few, many = token.expand(3, 16, 72), token.expand(2**30 + 1, 16, 72)
    cu_seqlens = torch.tensor([0, 3])
    for tensors in ((many, few, few), (few, many, many)):
        with pytest.raises(ValueError, match="1073741825 packed tokens, at most 1073741824 in one launch"):
            module.attention_forward.reference(*tensors, cu_seqlens, cu_seqlens)
