"""What the plan refuses, beyond one case of each code in tests/cases: where it points, and what it lets through."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dsl.architecture import ARCHITECTURES
from dsl.catalogue import CATALOGUE
from dsl.check import load_spec
from dsl.diagnostics import SpecError
from dsl.load import load
from dsl.pipeline import build
from dsl.plan import plan_module
from dsl.source import Source
from dsl.spec import Case
from dsl.verify.cases import Adversity
from dsl.verify.inputs import make_inputs
from tests.conftest import ROOT

DECODE = {"query": "single", "kv": "paged(block = 16)", "dtype": "bf16", "heads": "8 / 2", "head_dim": "64"}
PREFILL = {**DECODE, "query": "packed", "kv": "packed"}
WIDEST = {**PREFILL, "dtype": "fp32", "heads": "2", "head_dim": "576"}
"""Needs more shared memory than some chips have."""


def block(base: dict[str, str], name: str = "layer", **fields: str) -> str:
    return f"attention {name} {{ {' '.join(f'{field} = {value}' for field, value in {**base, **fields}.items())} }}\n"


def plan(text: str, *targets: str):
    return plan_module(load_spec(Source.from_text(text, "layer.attn")), targets or None)


def refusal(text: str, *targets: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        plan(text, *targets)
    return caught.value


def codes(text: str, *targets: str) -> list[str]:
    return [finding.code for finding in refusal(text, *targets).diagnostics]


def test_every_code_of_the_plan_is_in_the_catalogue() -> None:
    used = {code for path in (ROOT / "dsl" / "plan").glob("*.py") for code in re.findall(r"ATTN\d+", path.read_text())}
    assert used and used <= set(CATALOGUE)
    assert {code for code in CATALOGUE if code.startswith("ATTN5")} <= used


def test_all_refusals_of_a_file_come_in_one_run_and_in_order() -> None:
    text = block(DECODE, kv_dtype="int8", v_cache="k_cache") + block(PREFILL, "other", split="fixed(64)")
    found = refusal(text).diagnostics
    assert [finding.code for finding in found] == ["ATTN506", "ATTN507", "ATTN508"]
    assert [text[finding.span.start : finding.span.end] for finding in found] == ["int8", "k_cache", "fixed(64)"]


def test_an_inherited_refusal_notes_its_base() -> None:
    text = block(DECODE, kv_dtype="int8") + "attention derived from layer { heads = 16 }\n"
    first, second = refusal(text).diagnostics
    assert text[first.span.start : first.span.end] == "int8"
    assert text[second.span.start : second.span.end] == "derived"
    assert [text[span.start : span.end] for span, _ in second.related] == ["int8"]


@pytest.mark.parametrize(
    "fields",
    [
        {"mask": "true"},
        {"mask": "not false"},
        {"mask": "causal and q - kv < 128"},
        {"score": "softcap(score, 30) + alibi(h) * (kv - q)"},
        {"sink": "0.5"},
        {"mask": "false"},
        {"score": "score"},
        {"kv_dtype": "bf16"},
        {"split": "none"},
        {"softmax": "online"},
        {"targets": "[portable]"},
        {"targets": "[hopper, portable]"},
        {"scale": "1 / sqrt(80)"},
        {"lse": "true"},
        {"head_dim": "576 / 8"},
    ],
    ids=str,
)
@pytest.mark.parametrize("base", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_what_is_not_refused(base: dict[str, str], fields: dict[str, str]) -> None:
    assert plan(block(base, **fields)).public_names == ("layer",)


def test_a_fixed_split_is_for_decode() -> None:
    assert plan(block(DECODE, split="fixed(128)")).blocks
    assert codes(block(PREFILL, split="fixed(128)")) == ["ATTN508"]


# Targets.


def test_a_target_that_the_spec_leaves_out() -> None:
    assert codes(block(DECODE, targets="[hopper]")) == ["ATTN511"]
    assert plan(block(DECODE, targets="[hopper, portable]"), "portable").blocks
    assert codes(block(DECODE, targets="[portable]"), "hopper") == ["ATTN511"]


def test_a_target_of_the_caller_that_no_kernel_has() -> None:
    assert codes(block(DECODE), "hopper") == ["ATTN511"]


# Shared memory.


def test_chips_that_a_block_does_not_fit_are_known_with_the_bytes() -> None:
    unfit = plan(block(WIDEST)).blocks[0].unfit
    limits = {chip.name: chip.shared_bytes for chip in ARCHITECTURES}
    assert "sm86" in unfit and "sm90" not in unfit
    assert all(needed > limits[name] for name, needed in unfit.items())


@pytest.fixture
def widest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of a large block, as if on a chip that is too small for it."""
    spec = tmp_path / "widest.attn"
    spec.write_text(block(WIDEST))
    module = load(build(spec, tmp_path))
    monkeypatch.setattr(module, "_INTERPRETED", True)
    monkeypatch.setattr("triton.runtime.interpreter.InterpreterBuilder.is_repaired", True, raising=False)
    monkeypatch.setattr(module, "_architecture", lambda device: ("sm86", 84))
    return module


@pytest.mark.parametrize("views", ["aligned", "odd"])
def test_the_launcher_refuses_such_a_chip(widest: ModuleType, views: str) -> None:
    spec = load_spec(Source.from_text(block(WIDEST), "widest.attn")).attentions[0]
    inputs = make_inputs(spec, Case((3,), (5,)), adversity=Adversity(views=views))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"layer needs \d+ bytes of shared memory, more than sm86 has"):
        widest.layer(*inputs.positional)
    assert torch.isfinite(widest.layer.reference(*inputs.positional)).all()


@pytest.mark.parametrize("family", ["decode", "prefill"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_tiles_of_every_chip_fit_it(family: str, dtype: str) -> None:
    limits = {chip.name: chip.shared_bytes for chip in ARCHITECTURES}
    base = DECODE if family == "decode" else PREFILL
    for head_dim in ("8", "72", "128", "192 / 128", "256", "576 / 512", "576"):
        for heads in ("1", "8", "128 / 1"):
            planned = plan(block(base, dtype=dtype, head_dim=head_dim, heads=heads)).blocks[0]
            for chip, limit in limits.items():
                config = planned.configs.get(chip, planned.configs["default"])
                assert chip in planned.unfit or config.shared_bytes <= limit, (head_dim, heads, chip)
