"""Verification finds what is wrong with a module: a plain decode in PyTorch passes, each of its mutants fails."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsl.check import load_spec
from dsl.pipeline import build
from dsl.source import Source
from dsl.spec import Case, SpecFile
from dsl.verify.cases import Adversity, trials
from dsl.verify.compare import checked_rows, compare, expect
from dsl.verify.inputs import make_inputs
from dsl.verify.oracle import oracle
from dsl.verify.report import Report, Row
from dsl.verify.runner import verify_files
from dsl.verify.worker import verify_module
from tests.conftest import ROOT, run_python

BLOCK, DIM = 8, 16
DECODE = f"""
attention attend {{
    query = single  kv = paged(block = {BLOCK})  dtype = bf16  heads = 4 / 2  head_dim = {DIM}  lse = true
    k_cache = [block, kv_head, dim/8, slot, dim%8]
    v_cache = [block, kv_head, dim, slot]
}}
workload attend {{ seqs = 2  kv_len = 20 }}
"""

FAMILIES = {
    "decode": "query = single  kv = paged(block = 16)",
    "prefill": "query = packed  kv = packed",
    "paged": "query = packed  kv = paged(block = 16)",
    "dense": "query = batched  kv = batched",
}
EXTRAS = {
    "plain": "",
    "window": "mask = causal and q - kv < 20",
    "sink": "param sinks[head] : fp32  sink = sinks[h]  score = softcap(score, 30)  lse = true",
    "documents": "param doc[kv_token] : int32  mask = doc[kv_token] == doc[kv_len - 1]  lse = true",
    "no scale": "scale = 0.0",
    "two sizes": "head_dim = 24 / 8  dtype = fp32  mask = causal  score = score - alibi(h) * abs(q - kv)",
}


def file_of(text: str) -> SpecFile:
    return load_spec(Source.from_text(text, "attend.attn"))


def attend(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_lse: torch.Tensor | None = None,
    fault: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """A decode in plain PyTorch, right unless it is given a fault."""
    seqs, heads, _ = query.shape
    given = out
    out = torch.empty_like(query) if out is None or fault == "other tensor" else out
    lse = torch.empty(heads, seqs) if out_lse is None else out_lse
    for row in range(seqs):
        capacity = block_tables.shape[1] * BLOCK
        length = min(max(int(seq_lens[row]), 0), capacity)
        length = max(length - 1, min(length, 1)) if fault == "drops the last key" else length
        length = min(length + 1, capacity) if fault == "one key too many" and length else length
        if length == 0 and fault == "skips empty sequences":
            continue
        pages = block_tables[row, : -(-length // BLOCK)].long()
        pages = block_tables[row].long() if fault == "reads the whole table" else pages
        keys = k_cache[pages].permute(0, 3, 1, 2, 4).reshape(-1, 2, DIM).float()
        values = v_cache[pages].permute(0, 3, 1, 2).reshape(-1, 2, DIM).float()
        live = torch.arange(len(keys)) < length
        if fault != "zero times NaN":
            keys, values = keys[live], values[live]
        head = torch.arange(heads) % 2 if fault == "wrong head" else torch.arange(heads) // 2
        factor = 32**-0.5 if fault == "padded scale" else DIM**-0.5
        score = torch.einsum("hd,nhd->hn", query[row].float(), keys[:, head]) * factor
        if fault == "zero times NaN":
            score = score.masked_fill(~live, -math.inf)
        if fault == "rounds scores":
            score = score.bfloat16().float()
        lse[:, row] = score.logsumexp(dim=1) / (math.log(2) if fault == "base 2" else 1)
        weights = score.softmax(dim=1)
        if fault == "maximum of the first keys":
            weights = (score - score[:, :16].amax(dim=1, keepdim=True)).exp()
        if fault == "maximum from 0":
            weights = (score - score.amax(dim=1, keepdim=True).clamp(min=0)).exp()
        weights = weights / weights.sum(dim=1, keepdim=True)
        out[row] = torch.einsum("hn,nhd->hd", weights, values[:, head]).to(out.dtype)
    if fault == "writes beside" and given is not None:
        given.as_strided((1,), (1,), (given.storage_offset() + DIM) % given.untyped_storage().nbytes()).fill_(1)
    if fault == "crashes":
        raise RuntimeError("boom")
    return out, lse


def module_with(fault: str, reference_fault: str = "") -> Any:
    def function(*arguments: Any, **keywords: Any) -> Any:
        return attend(*arguments, **keywords, fault=fault)

    def reference(*arguments: Any, **keywords: Any) -> Any:
        return attend(*arguments, **keywords, fault=reference_fault)

    function.reference = reference  # type: ignore[attr-defined]
    return SimpleNamespace(attend=function)


def failures(module: Any) -> list[Row]:
    return [row for row in verify_module(module, file_of(DECODE), "cpu") if not row.passed]


def test_a_right_module_passes() -> None:
    rows = list(verify_module(module_with(""), file_of(DECODE), "cpu"))
    assert {row.function for row in rows} == {"attend", "attend.reference"}
    assert all(row.passed for row in rows), [row for row in rows if not row.passed]
    assert all(row.lse_error is not None and row.error is not None for row in rows)


@pytest.mark.parametrize(
    "fault",
    [
        "drops the last key",
        "one key too many",
        "skips empty sequences",
        "reads the whole table",
        "zero times NaN",
        "wrong head",
        "padded scale",
        "rounds scores",
        "base 2",
        "maximum of the first keys",
        "maximum from 0",
        "other tensor",
        "writes beside",
        "crashes",
    ],
)
def test_a_fault_is_found(fault: str) -> None:
    found = failures(module_with(fault))
    assert found and all(row.function == "attend" for row in found)


def test_a_wrong_reference_is_found() -> None:
    found = failures(module_with("", reference_fault="drops the last key"))
    assert found and {row.function for row in found} == {"attend.reference"}


def test_a_crash_is_a_row_with_its_text() -> None:
    assert failures(module_with("crashes"))[0].problem == "RuntimeError: boom"


def test_a_missing_function_is_a_row() -> None:
    assert failures(SimpleNamespace())[0].problem == "LookupError: the module has no attend"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("extra", EXTRAS)
def test_every_trial_agrees_with_itself(family: str, extra: str) -> None:
    fields = {"dtype": "bf16", "heads": "4 / 2", "head_dim": "16"}
    lines = [f"{name} = {value}" for name, value in fields.items() if f"{name} =" not in EXTRAS[extra]]
    file = file_of(f"attention f {{ {FAMILIES[family]} {' '.join(lines)} {EXTRAS[extra]} }}")
    spec = file.attentions[0]
    for trial in trials(spec, (), "small"):
        inputs = make_inputs(spec, trial.case, adversity=trial.adversity)
        out, lse = oracle(spec, inputs)
        assert out.isfinite().all(), trial
        assert inputs.out is None or inputs.out.shape == out.shape
        rounded = out.to(torch.float32 if spec.dtype == "fp32" else torch.bfloat16)
        found = compare(spec, expect(spec, inputs), rounded, lse.float())
        assert found.problem is None, (trial, found)


# Inputs.


def decode_inputs(adversity: Adversity) -> Any:
    return make_inputs(file_of(DECODE).attentions[0], Case((1, 1, 1), (0, 9, 21)), adversity=adversity)


def test_poison_lies_in_every_dead_slot_and_nowhere_else() -> None:
    inputs = decode_inputs(Adversity(poison=True))
    is_dead = torch.ones(inputs["v_cache"].shape[0], BLOCK, dtype=torch.bool)
    for row, length in ((1, 9), (2, 21)):
        position = torch.arange(length)
        is_dead[inputs["block_tables"][row, position // BLOCK].long(), position % BLOCK] = False
    assert torch.equal(inputs["v_cache"].isnan().all(dim=2).all(dim=1), is_dead)
    assert torch.equal(inputs["k_cache"].isnan().any(dim=4).any(dim=2).any(dim=1), is_dead)
    assert inputs["block_tables"][1, 0] == inputs["block_tables"][2, 0]
    assert {2**30, -1} >= set(inputs["block_tables"][0].tolist())
    assert inputs["seq_lens"][0] < 0


def test_poison_reaches_keys_outside_a_window() -> None:
    spec = file_of(DECODE.replace("lse = true", "mask = q - kv < 5")).attentions[0]
    inputs = make_inputs(spec, Case((1,), (21,)), adversity=Adversity(poison=True))
    page = inputs["block_tables"][0, 0].long()
    assert inputs["v_cache"][page].isnan().all()
    assert oracle(spec, inputs)[0].isfinite().all()


def test_views_have_odd_strides_and_guard_their_output() -> None:
    inputs = decode_inputs(Adversity(views="aligned"))
    assert inputs["k_cache"].stride(0) == 2 * inputs["k_cache"][0].numel()
    assert inputs["query"].stride(1) == DIM + 8 and inputs["query"].data_ptr() % 16 == 0
    assert inputs["seq_lens"].dtype == torch.int64
    assert inputs.out.isnan().all() and inputs.is_intact
    odd = decode_inputs(Adversity(views="odd"))
    assert odd["query"].stride(1) == DIM + 1 and odd["query"].data_ptr() % 16
    odd.guards[0][0] = 1
    assert not odd.is_intact


def test_rows_of_nobody_surround_packed_sequences() -> None:
    spec = file_of("attention f { query = packed kv = packed dtype = fp16 heads = 2 head_dim = 8 }").attentions[0]
    inputs = make_inputs(spec, Case((4,), (6,)), adversity=Adversity(poison=True))
    assert inputs["cu_seqlens_q"].tolist() == [3, 7] and len(inputs["q"]) == 9
    assert inputs["q"].isnan().all(dim=-1).all(dim=-1).nonzero().flatten().tolist() == [0, 1, 2, 7, 8]


def test_a_large_batch_is_sampled_at_its_edges() -> None:
    spec = file_of("attention f { query = packed kv = packed dtype = fp16 heads = 16 head_dim = 8 }").attentions[0]
    inputs = make_inputs(spec, Case((40000,), (40000,)))
    wanted = checked_rows(spec, inputs).tolist()
    assert len(wanted) < 300 and {0, 127, 128, 39999} <= set(wanted)


# Whole runs.

FAKE_MODULE = """
import os
import torch

def attend(query, k_cache, v_cache, block_tables, seq_lens, *, out=None, out_lse=None):
    print("noise on stdout")
    if {dies} and out is not None:
        os._exit(3)
    out = torch.empty_like(query) if out is None else out
    lse = torch.empty(query.shape[1], query.shape[0]) if out_lse is None else out_lse
    return out.zero_(), lse.fill_(float("-inf"))

attend.reference = attend
"""


def run(folder: Path, *, dies: bool = False) -> tuple[Report, list[Row]]:
    (folder / "attend.attn").write_text(DECODE)
    (folder / "attend.py").write_text(FAKE_MODULE.format(dies=dies))
    seen: list[Row] = []
    return verify_files([folder / "attend.attn"], device="cpu", output_dir=folder, progress=seen.append), seen


def test_a_run_reports_every_row_and_does_not_pass_a_wrong_module(tmp_path: Path) -> None:
    report, seen = run(tmp_path)
    assert tuple(seen) == report.rows and not report.passed and len(report.failures) == len(report.rows)
    fields = json.loads(json.dumps(report.to_dict()))
    assert fields["schema"] == "attnspec.verify/1" and fields["passed"] is False
    assert fields["not_run"] and fields["rows"][0]["lse_error"] == "inf"
    assert report.table().row_count == len(report.rows)
    assert "the error is 1.0e+00, over 3.0e-03" in str(report.rows[0].problem)


def test_large_scores_of_a_tiny_scale_stay_in_the_dtype() -> None:
    (spec,) = file_of(
        "attention f { query = packed  kv = packed  dtype = fp16  heads = 1  head_dim = 8  scale = 0.0001 }"
    ).attentions
    inputs = make_inputs(spec, Case((9,), (40,)), adversity=Adversity(logits=40.0))
    assert inputs["q"].isfinite().all() and inputs["q"].abs().max() > 100


def test_a_process_that_dies_is_a_row(tmp_path: Path) -> None:
    report, _ = run(tmp_path, dies=True)
    assert "status 3 after attend" in str(report.rows[-1].problem)


def test_an_unknown_name_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "attend.attn").write_text(DECODE)
    (tmp_path / "attend.py").write_text(FAKE_MODULE.format(dies=False))
    report = verify_files([tmp_path / "attend.attn"], device="cpu", output_dir=tmp_path, only=["attned"])
    assert [row.problem for row in report.rows] == ["no block or dispatch has that name"]


def test_nothing_verified_is_not_a_pass() -> None:
    assert not Report("cpu", ()).passed


GENERATED = {
    "decode": "query = single  kv = paged(block = 16)  dtype = bf16  heads = 4 / 1  head_dim = 24",
    "prefill": "query = packed  kv = packed  dtype = fp16  heads = 2  head_dim = 24",
    "prefill_negative_scale": "query = packed  kv = packed  dtype = fp32  heads = 2  head_dim = 24  scale = -0.3",
}


@pytest.mark.parametrize("family", GENERATED)
def test_a_generated_module_passes(family: str, tmp_path: Path) -> None:
    spec = tmp_path / f"{family}.attn"
    spec.write_text(f"attention f {{ {GENERATED[family]} }} dispatch g = [f]")
    report = verify_files([spec], device="cpu")
    assert report.passed, report.failures
    assert {row.function for row in report.rows} == {"f", "f.reference", "g"}


def test_rows_reduced_in_parts_agree(tmp_path: Path) -> None:
    """The interpreter runs the default tiles, which reduce a row at once; Hopper's do not."""
    spec = tmp_path / "parts.attn"
    spec.write_text("attention f { query = packed  kv = packed  dtype = fp16  heads = 2  head_dim = 24  lse = true }")
    path = build(spec, tmp_path)
    text = path.read_text()
    assert '"ROW_PARTS": 1' in text
    path.write_text(text.replace('"ROW_PARTS": 1', '"ROW_PARTS": 8'))
    request = {"name": spec.name, "text": spec.read_text(), "module": str(path), "device": "cpu"}
    done = run_python(
        "-m", "dsl.verify.worker", environment={"TRITON_INTERPRET": "1"}, input=json.dumps(request).encode()
    )
    rows = [json.loads(line) for line in done.stdout.decode().split("\x1e")[1:]]
    assert done.returncode == 0 and rows, done.stderr.decode()
    assert all(row["passed"] for row in rows), rows


def test_a_dispatch_over_blocks_that_launch_differently_passes() -> None:
    report = verify_files([ROOT / "tests" / "specs" / "mixed_dispatch.attn"], device="cpu")
    assert report.passed, report.failures


def test_the_package_imports_no_torch() -> None:
    code = "import sys, dsl.verify, dsl.verify.runner; sys.exit('torch' in sys.modules)"
    assert run_python("-c", code).returncode == 0
