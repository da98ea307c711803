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
from dsl.plan.prefill_hopper import HEAD_DIMS
from dsl.render import render
from dsl.source import Source
from tests.conftest import ROOT

FIELDS = {"query": "packed", "kv": "packed", "dtype": "bf16", "heads": "8 / 2", "head_dim": "72"}


def plan_of(*targets: str, **fields: str) -> ModulePlan:
    text = " ".join(f"{name} = {value}" for name, value in {**FIELDS, **fields}.items())
    return plan_module(load_spec(Source.from_text(f"attention attend {{ {text} }}", "attend.attn")), targets or None)


def test_a_block_has_both_kernels():
    assert [kernel.name for kernel in plan_of().kernels] == ["_prefill_kernel", "_prefill_hopper_kernel"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "fp32"}, "bf16 and fp16"),
        ({"head_dim": "256"}, "head_dim is one of"),
        ({"head_dim": "128 / 64"}, "head_dim is one of"),
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


@pytest.mark.compile
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("fields", [{}, {"dtype": "fp16", "lse": "true"}], ids=["bf16", "fp16 lse"])
def test_no_spills_and_wgmma_in_flight(dim: int, fields: dict[str, str], tmp_path: Path, monkeypatch: Any, capfd: Any):
    import triton

    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    monkeypatch.setattr(triton.knobs.nvidia, "dump_ptxas_log", True)
    plan = plan_of(head_dim=str(dim), **fields)
    path = tmp_path / "attend.py"
    path.write_text(render(plan))
    kernels = compile_module(plan, path, architecture("sm90"))
    (kernel,) = (kernel for kernel in kernels if kernel.launch.kernel.name == "_prefill_hopper_kernel")
    assert kernel.fits and kernel.within_plan
    assert kernel.compiled.spill_bytes == 0
    # What ptxas says where it cannot keep a wgmma in flight.
    assert "wgmma.mma_async instructions are serialized" not in "".join(capfd.readouterr())


def test_the_launcher_takes_it_where_it_runs(monkeypatch: pytest.MonkeyPatch):
    module = load(ROOT / "generated" / "prefill.py")
    block = module._bf16_16_72_block
    chip = SimpleNamespace(name="sm90")
    monkeypatch.setattr(module, "_INTERPRETED", False)
    monkeypatch.setattr(module, "_architecture", lambda device: (chip.name, 132))
    q, k, v = (torch.empty(20, 16, 72, dtype=torch.bfloat16) for _ in "qkv")
    assert module._target(block, q, k, v, 8) == "hopper"
    assert module._target(block, q, k, v, 1) == "portable"
    assert module._target(block, q, k[:0], v[:0], 8) == "portable"
    assert module._target(block, q, k[:1].expand(20, -1, -1), v, 8) == "portable"
    assert module._target(block._replace(hopper=None), q, k, v, 8) == "portable"
    monkeypatch.setattr(module, "_TRITON", (3, 5))
    assert module._target(block, q, k, v, 8) == "portable"
    monkeypatch.setattr(module, "_TRITON", (3, 6))
    chip.name = "sm100"
    assert module._target(block, q, k, v, 8) == "portable"
