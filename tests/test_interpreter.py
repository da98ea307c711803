"""Triton's interpreter, repaired: in every version at hand, dots and casts give what a GPU gives."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT, run_python

OTHER_VERSIONS = sorted(str(path) for path in ROOT.glob(".triton*") if (path / "triton").is_dir())
"""Folders beside the project, each with another version of Triton."""


@cache
def probe(folder: str) -> dict:
    """What tests/interpreter_probe.py computes with the Triton in `folder`, or with the installed one."""
    path = os.pathsep.join(filter(None, (folder, str(ROOT))))
    environment = {"PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    script = ROOT / "tests" / "interpreter_probe.py"
    done = run_python("-W", "error::DeprecationWarning", script, environment=environment)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


versions = pytest.mark.parametrize("folder", ["", *OTHER_VERSIONS], ids=lambda folder: Path(folder).name or "installed")


@versions
def test_dots_of_16_bit_types_are_exact(folder: str) -> None:
    errors = probe(folder)["dot"]
    for dtype in ("bf16", "fp16"):
        for precision in ("ieee", "tf32", "tf32x3"):
            assert errors[f"{dtype} {precision}"] < 1e-6


@versions
def test_fp32_dots_honour_their_precision(folder: str) -> None:
    errors = probe(folder)["dot"]
    assert errors["fp32 ieee"] < 1e-6 and errors["fp32 tf32x3"] < 1e-6
    assert 1e-4 < errors["fp32 tf32"] < 5e-3


@versions
def test_casts_round_as_pytorch_does(folder: str) -> None:
    assert set(probe(folder)["cast"].values()) == {0}


@versions
def test_bf16_arithmetic(folder: str) -> None:
    assert probe(folder)["product"] == 0


UNREPAIRED = """
import torch
from dsl.load import load

module = load("{path}")
query = torch.ones(1, 4, 128, dtype=torch.bfloat16)
cache = torch.ones(1, 1, 16, 16, 8, dtype=torch.bfloat16), torch.ones(1, 1, 128, 16, dtype=torch.bfloat16)
module.bf16_4_1(query, *cache, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
"""


def test_an_interpreter_that_is_not_repaired_is_refused_for_bf16():
    script = UNREPAIRED.format(path=ROOT / "generated" / "decode.py")
    done = run_python("-c", script, environment={"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"})
    assert done.returncode == 1
    assert b"interpreter computes bf16 wrongly" in done.stderr
