"""Timing by a clock that only counts what functions say they take; what is wrong is never timed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsl.bench import bench_files
from dsl.bench.batches import MOST_SETS, batch
from dsl.bench.measure import CALLS, GRAPH_SECONDS, Call, Machine, Run, interleaved, prepare, times
from dsl.bench.report import Report, Row
from dsl.bench.runner import bench_block, online_module
from dsl.bench.table import table
from dsl.check import load_spec
from dsl.plan import ModulePlan
from dsl.plan.cost import cost
from dsl.source import Source
from dsl.spec import SpecFile
from tests.bench_fakes import LIMITS, MACHINE, PREFILL, WORKLOAD, FakeClock, attend, file_of, job_of
from tests.conftest import DECODE, ROOT, SPECS, run_attnspec, run_python


def test_rows_hold_times_and_rates():
    clock, file = FakeClock(), file_of(DECODE + WORKLOAD)
    rows = list(bench_block(job_of(file, small=attend(file, clock)), clock, LIMITS))
    assert [row.case for row in rows] == ["2 seqs, kv_len 20", "1 seq, kv_len 33"]
    for row, case in zip(rows, file.workloads[0].cases, strict=True):
        needs = cost(file.attentions[0], case)
        assert row.passed and row.mode == "graph" and row.problem is None
        assert row.latency_us == pytest.approx(100) and row.eager_us == pytest.approx(110)
        assert row.tb_per_s == pytest.approx(needs.bytes / 1e-4 / 1e12)
        assert row.copy_percent == pytest.approx(100 * needs.bytes / 1e-4 / 4e12)
        assert row.matmul_percent == pytest.approx(100 * needs.flops / 1e-4 / 8e14)
        assert row.error is not None and row.bar is not None and row.error <= row.bar


@pytest.mark.parametrize(
    ("fault", "problem"),
    [(lambda count: True, "the error is"), (lambda count: count > 30, "right when called alone, but as it was timed")],
    ids=["wrong", "wrong later"],
)
def test_what_is_wrong_is_not_timed(fault: Callable[[int], bool], problem: str):
    clock, file = FakeClock(), file_of(PREFILL)
    (row,) = bench_block(job_of(file, small=attend(file, clock, fault=fault)), clock, LIMITS)
    assert row.status == "INCORRECT_NUMERICAL" and row.latency_us is None
    assert row.problem is not None and row.problem.startswith(problem)


def test_what_crashes_is_a_failed_row():
    def function(*tensors: Any) -> None:
        raise RuntimeError("out of resources")

    file = file_of(PREFILL)
    (row,) = bench_block(job_of(file, small=function), FakeClock(), LIMITS)
    assert row.status == "RUNTIME_ERROR" and row.problem == "RuntimeError: out of resources"


def test_long_calls_are_timed_without_a_graph():
    clock = FakeClock()
    run = prepare(clock, [lambda: clock.spend(2 * GRAPH_SECONDS)] * 3)
    assert (run.mode, run.count, clock.captured) == ("eager", 3, [])
    assert times(clock, {"": run}, {"": run.function})[""].median == pytest.approx(2 * GRAPH_SECONDS)


@pytest.mark.parametrize(("sets", "calls"), [(1, CALLS), (7, 21), (64, 64)])
def test_a_graph_takes_every_set_equally_often(sets: int, calls: int):
    clock = FakeClock()
    run = prepare(clock, [lambda: clock.spend(1e-5)] * sets)
    assert (run.mode, run.count, clock.captured) == ("graph", calls, [calls])


def test_runs_take_turns_and_the_median_is_reported():
    clock, order = FakeClock(), []

    def run(name: str, seconds: float) -> Run:
        return Run("eager", lambda: (order.append(name), clock.spend(seconds * (1 + len(order)))), 1)

    samples = interleaved(clock, {"a": run("a", 1.0), "b": run("b", 2.0)}, rounds=3)
    assert order == ["a", "b"] * 4
    assert samples == {"a": [4.0, 6.0, 8.0], "b": [10.0, 14.0, 18.0]}
    growing = Run("eager", iter_seconds(clock, range(1, 1000)), 1)
    found = times(clock, {"a": growing}, {"a": lambda: clock.spend(1.0)})["a"]
    assert (found.p20, found.median, found.p80) == (6, 12, 18)


def iter_seconds(clock: FakeClock, seconds: Sequence[int]) -> Call:
    upcoming = iter(seconds)
    return lambda: clock.spend(next(upcoming))


@pytest.mark.parametrize(("l2_bytes", "sets"), [(1, 1), (20_000, 2), (10**9, MOST_SETS)])
def test_input_sets_outgrow_the_cache(l2_bytes: int, sets: int):
    file = file_of(DECODE + WORKLOAD)
    (spec,), case = file.attentions, file.workloads[0].cases[0]
    assert 20_000 < cost(spec, case).bytes < 40_000
    machine = Machine("fake", "sm90", 132, l2_bytes, "2", "3")
    found = batch(spec, case, FakeClock(machine))
    assert len(found.sets) == sets
    assert sets == 1 or not torch.equal(found.sets[0]["query"], found.sets[1]["query"])


def test_a_file_is_built_and_its_rows_are_collected(tmp_path: Path):
    """Without a GPU the kernel refuses its tensors, which is a failed row."""
    path = tmp_path / "attend.attn"
    path.write_text(f"{DECODE}{WORKLOAD} attention idle from small {{ heads = 2 / 2 }} dispatch both = [small, idle]")
    seen: list[Row] = []
    report = bench_files([path], clock=FakeClock(), progress=seen.append)
    assert tuple(seen) == report.rows and not report.passed
    assert [row.block for row in report.rows] == ["small", "small"]
    assert all("does not run on cpu" in (row.problem or "") for row in report.rows)
    assert report.not_timed == (f"idle of {path} has no workload",)
    assert [row.block for row in bench_files([path], clock=FakeClock(), only=["both"]).rows] == ["small", "small"]
    assert bench_files([path], clock=FakeClock(), only=["idle"]).rows == ()
    (row,) = bench_files([path], clock=FakeClock(), only=["idle", "smal"]).rows
    assert row.block == "smal" and row.problem == "no block or dispatch has that name"


def test_a_spec_that_was_read_already_is_benched_like_its_file(tmp_path: Path):
    source = Source.from_text(DECODE + WORKLOAD, "attend.attn")
    (tmp_path / "attend.attn").write_text(source.text)
    rows = bench_files([source], clock=FakeClock()).rows
    read = bench_files([tmp_path / "attend.attn"], clock=FakeClock()).rows
    assert [(row.block, row.case, row.problem) for row in rows] == [(row.block, row.case, row.problem) for row in read]


def test_shapes_are_in_the_rows():
    text = "attention small { query = packed  kv = packed  dtype = fp16  heads = 4 / 2  head_dim = 24 }"
    file = file_of(text + "workload small { q_len = [[3, 5]]  kv_len = [[7, 2]] }")
    (row,) = bench_block(job_of(file, small=attend(file, FakeClock())), FakeClock(), LIMITS)
    shape = row.shape
    assert shape is not None
    assert (shape.family, shape.dtype, shape.heads, shape.kv_heads) == ("prefill", "fp16", 4, 2)
    assert (shape.head_dim_qk, shape.head_dim_v, shape.seqs, shape.q_tokens, shape.kv_tokens) == (24, 24, 2, 8, 9)


def test_server_batches_are_what_the_notes_say():
    file = load_spec(Source.read(ROOT / "specs" / "server.attn"))
    (workload,) = (workload for workload in file.workloads if workload.block == "prefill_16_72")
    same, ragged = workload.cases
    assert same.q_lens == same.kv_lens == (1024,) * 64
    assert ragged.q_lens == ragged.kv_lens == tuple(1 + i * 97 % 300 for i in range(512))


# The same block under `softmax = online`.


def with_online(file: SpecFile, clock: FakeClock, seconds: float, fault: Callable[[int], bool] = lambda count: False):
    job = job_of(file, small=attend(file, clock))
    return replace(job, online=SimpleNamespace(small=attend(file, clock, seconds, fault)))  # type: ignore[arg-type]


def test_both_ways_of_the_softmax_are_timed_where_they_differ():
    clock, file = FakeClock(), file_of(PREFILL)
    (row,) = bench_block(with_online(file, clock, 3e-4), clock, LIMITS)
    assert row.passed and row.latency_us == pytest.approx(100)
    assert row.online is not None and row.online.us == pytest.approx(300)
    assert row.ratio is None and row.peers == {}


def test_a_wrong_online_softmax_fails_the_row():
    clock, file = FakeClock(), file_of(PREFILL)
    (row,) = bench_block(with_online(file, clock, 3e-4, lambda count: True), clock, LIMITS)
    assert row.status == "INCORRECT_NUMERICAL" and row.latency_us is None
    assert row.problem is not None and row.problem.startswith("under softmax = online: the error is")


@pytest.mark.parametrize(("softmax", "differs"), [("auto", True), ("online", False)])
def test_the_second_module_is_made_where_the_text_differs(
    softmax: str, differs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def printed(plan: ModulePlan) -> str:
        (spec,) = plan.file.attentions
        return f"{spec.name} = '{spec.softmax}'\n"

    monkeypatch.setattr("dsl.bench.runner.render", printed)
    file = file_of(PREFILL.replace("heads = 2", f"heads = 2  softmax = {softmax}"))
    module = online_module(file, file.attentions[0], tmp_path / "online")
    assert (module is not None) is differs
    assert module is None or module.small == "online"


def test_the_kernels_themselves_run_through_it(tmp_path: Path):
    """In Triton's interpreter, with a clock for which every call is long."""
    path = tmp_path / "attend.attn"
    path.write_text(DECODE + "workload small { kv_len = 20 }")
    program = f"""
from dsl.verify.interpreter import repair
repair()
from dsl.bench import bench_files
from tests.bench_fakes import FakeClock
clock = FakeClock()
clock.sample = lambda run: (run(), 1.0)[1]
clock.wall = lambda call, times: 1.0 * times
report = bench_files([{str(path)!r}], clock=clock)
assert report.passed, report.rows
assert report.rows[0].latency_us == 1e6, report.rows
"""
    run = run_python("-c", program, environment={"TRITON_INTERPRET": "1"})
    assert run.returncode == 0, run.stderr.decode()


def test_a_report_is_json_and_a_table():
    rows = (
        Row("a.attn", "small", "1 seq", "PASSED", 10, 20, "graph", 1.0, 0.9, 1.1, 5.0, 3.2, 0.5, 80.0, 0.1, 1e-3, 3e-3),
        Row("a.attn", "other", "1 seq", "INCORRECT_NUMERICAL", error=float("inf"), problem="the error is inf"),
    )
    report = Report(MACHINE, LIMITS, rows)
    assert not report.passed and report.failures == rows[1:] and not Report(MACHINE, LIMITS, ()).passed
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["schema"] == "attnspec.bench/2" and data["rows"][1]["error"] == "inf"
    assert data["machine"]["architecture"] == "sm90" and data["copy_tb_per_s"] == 4.0
    assert table(report).row_count == 2


# The command line.


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_without_a_gpu_there_is_one_line_or_one_object(tmp_path: Path):
    plot = tmp_path / "plot.svg"
    plain = run_attnspec("bench", SPECS[0], "--plot", plot)
    assert (plain.returncode, plain.stdout) == (2, b"")
    assert plain.stderr.decode().splitlines() == ["error: no GPU: there is nothing to time on"]
    answer = run_attnspec("bench", SPECS[0], "--json")
    assert (answer.returncode, answer.stderr) == (2, b"")
    assert json.loads(answer.stdout) == {
        "schema": "attnspec.bench/2",
        "passed": False,
        "rows": [],
        "error": "no GPU: there is nothing to time on",
    }
    assert not list(tmp_path.iterdir())


def test_a_wrong_spec_is_reported_first(tmp_path: Path):
    path = tmp_path / "wrong.attn"
    path.write_text(DECODE.replace("bf16", "bf17"))
    run = run_attnspec("bench", path, "--json")
    assert run.returncode == 1
    assert json.loads(run.stdout)["files"][0]["diagnostics"]


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path):
    path = tmp_path / "attend.attn"
    path.write_text(DECODE + "workload small { seqs = [4, 64]  kv_len = [128, 4096] }")
    report = bench_files([path])
    assert report.passed, report.failures
    assert all(row.mode == "graph" and 0 < row.copy_percent < 200 for row in report.rows)  # type: ignore[operator]
