"""Timing by a clock that only counts what functions say they take; what is wrong is never timed, nor tuned to."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsl.architecture import architecture
from dsl.bench import TuneError, bench_files, tune_files
from dsl.bench.batches import MOST_SETS, batch
from dsl.bench.candidates import candidates
from dsl.bench.measure import CALLS, GRAPH_SECONDS, Call, Ceilings, Machine, Run, interleaved, prepare, times
from dsl.bench.report import Report, Row
from dsl.bench.runner import Job, bench_block
from dsl.bench.tune import tune_jobs
from dsl.bench.tuning_file import Key, TuningFileError, read_entries, text_of
from dsl.check import load_spec
from dsl.plan import plan_module
from dsl.plan.cost import cost
from dsl.source import Source
from dsl.spec import SpecFile
from dsl.verify.oracle import oracle
from tests.conftest import DECODE, SPECS, run_attnspec, run_python

WORKLOAD = "workload small { seqs = [2, 1]  kv_len = [20, 33] }"
PREFILL = """
attention small { query = packed  kv = packed  dtype = fp16  heads = 2  head_dim = 24 }
workload small { q_len = 9 }
"""
LIMITS = Ceilings(copy=4e12, matmul={"bf16": 8e14, "fp16": 8e14})
MACHINE = Machine("fake", "sm90", 132, l2_bytes=1, torch="2", triton="3")


class FakeClock:
    """Time passes when a function says so, and at each launch from Python."""

    device = "cpu"
    launch_seconds = 1e-5

    def __init__(self, machine: Machine = MACHINE) -> None:
        self.machine = machine
        self.now = 0.0
        self.captured: list[int] = []

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def synchronize(self) -> None:
        pass

    def sample(self, run: Call) -> float:
        start = self.now
        run()
        return self.now - start

    def wall(self, call: Call, times: int) -> float:
        return sum(self.sample(call) + self.launch_seconds for _ in range(times))

    def capture(self, calls: Sequence[Call]) -> Call:
        self.captured.append(len(calls))
        return lambda: [call() for call in calls]

    def copy(self) -> tuple[Call, int]:
        return lambda: self.spend(1.0), 4 * 10**12

    def matmul(self, dtype: str) -> tuple[Call, int]:
        return lambda: self.spend(1.0), 8 * 10**14


def file_of(text: str) -> SpecFile:
    return load_spec(Source.from_text(text, "attend.attn"))


def attend(file: SpecFile, clock: FakeClock, seconds: float = 1e-4, fault: Callable[[int], bool] = lambda count: False):
    """The oracle as a function that takes a while; its call number `count` is wrong where `fault` says so."""
    (spec,) = file.attentions
    counts = iter(range(10**6))

    def function(*tensors: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        clock.spend(seconds)
        result = oracle(spec, dict(zip(spec.arguments, tensors, strict=True)))[0].to(tensors[0].dtype)
        result = 2 * result if fault(next(counts)) else result
        return result if out is None else out.copy_(result)

    return function


def job_of(file: SpecFile, **members: Any) -> Job:
    (spec,) = file.attentions
    return Job(file, SimpleNamespace(**members), spec, file.workloads[0].cases)  # type: ignore[arg-type]


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
    assert times(clock, run, run.function).median == pytest.approx(2 * GRAPH_SECONDS)


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
    found = times(clock, Run("eager", iter_seconds(clock, range(1, 1000)), 1), lambda: clock.spend(1.0))
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


def test_the_kernels_themselves_run_through_it(tmp_path: Path):
    """In Triton's interpreter, with a clock for which every call is long."""
    path = tmp_path / "attend.attn"
    path.write_text(DECODE + "workload small { kv_len = 20 }")
    program = f"""
from dsl.verify.interpreter import repair
repair()
from dsl.bench import bench_files
from tests.test_bench import FakeClock
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
    assert data["schema"] == "attnspec.bench/1" and data["rows"][1]["error"] == "inf"
    assert data["machine"]["architecture"] == "sm90" and data["copy_tb_per_s"] == 4.0
    assert report.table().row_count == 2


# Tuning.


def tunable(file: SpecFile, clock: FakeClock, seconds: Callable[[dict[str, int]], float | Exception | None]) -> Job:
    """A block whose function takes what `seconds` says of its tiles: raises an exception, and is wrong for None."""
    (block,) = plan_module(file).blocks
    record = SimpleNamespace(unfit={}, configs={name: dict(config.entries) for name, config in block.configs.items()})

    def function(*tensors: Any, **buffers: Any) -> torch.Tensor:
        found = seconds(record.configs.get("sm90", record.configs["default"]))
        if isinstance(found, Exception):
            raise found
        return attend(file, clock, found or 1e-6, lambda count: found is None)(*tensors, **buffers)

    return job_of(file, small=function, _small_block=record)


def test_the_fastest_right_candidate_is_chosen():
    def seconds(tiles: dict[str, int]) -> float | Exception | None:
        if tiles["TILE"] == 16:
            return None
        if tiles["num_warps"] == 8:
            return RuntimeError("out of registers")
        return 1e-5 * (tiles["num_warps"] + abs(tiles["TILE"] - 32) / 16)

    clock, file = FakeClock(), file_of(DECODE + WORKLOAD)
    job = tunable(file, clock, seconds)
    before = json.dumps(job.module._small_block.configs)
    (choice,) = tune_jobs([job], clock, lambda line: None).choices
    assert choice.key == Key("decode", 2, 64, 4) and choice.blocks == ("small",)
    assert choice.config == {"TILE": 32, "num_warps": 1, "num_stages": 1}
    planned = job.module._small_block.configs.get("sm90", job.module._small_block.configs["default"])
    assert choice.gain == pytest.approx(seconds(planned) / 1e-5)  # type: ignore[operator]
    assert any(line.startswith("TILE 16 num_warps 1 num_stages 1: the error is") for line in choice.skipped)
    assert any(line == "TILE 64 num_warps 8 num_stages 1: RuntimeError: out of registers" for line in choice.skipped)
    assert json.dumps(job.module._small_block.configs) == before


def test_no_possible_candidate_is_one_error_with_all_reasons():
    clock, file = FakeClock(), file_of(PREFILL)
    job = tunable(file, clock, lambda tiles: RuntimeError("out of resources"))
    with pytest.raises(TuneError, match="no candidate runs small") as caught:
        tune_jobs([job], clock, lambda line: None)
    assert str(caught.value).count("out of resources") == len(candidates(job.spec, architecture("sm90")))


def test_an_unknown_chip_is_refused():
    clock = FakeClock(Machine("fake", "sm42", 1, 1, "2", "3"))
    with pytest.raises(TuneError, match="the plan does not know sm42"):
        tune_jobs([], clock, lambda line: None)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.stem)
def test_candidates_are_as_the_plan_would_make_them(spec: Path):
    for block in plan_module(load_spec(Source.read(spec))).blocks:
        known = {tuple(config.entries.items()): config for config in candidates(block.spec, architecture("sm90"))}
        config = block.config("sm90")
        assert config is not None
        assert all(len(entries) == len(config.entries) for entries in known)
        found = known.get(tuple(config.entries.items()))
        assert found is None or found.shared_bytes == config.shared_bytes
        assert found is not None or block.spec.family == "prefill"


def test_a_tuning_file_is_merged_in_order(tmp_path: Path):
    path = tmp_path / "sm90.json"
    assert read_entries(path) == {}
    near, far = Key("prefill", 2, 72, 1), Key("prefill", 2, 96, 128)
    path.write_text(text_of(MACHINE, {far: {"BLOCK_Q": 64}, Key("decode", 2, 64, 4): {"TILE": 16}}))
    entries = read_entries(path) | {near: {"BLOCK_Q": 128}}
    assert list(read_entries(path)) == [Key("decode", 2, 64, 4), far]
    path.write_text(text_of(MACHINE, entries))
    assert list(read_entries(path)) == [Key("decode", 2, 64, 4), near, far]
    assert text_of(MACHINE, read_entries(path)) == path.read_text()


def test_a_file_that_is_no_tuning_file_is_left_alone(tmp_path: Path):
    path = tmp_path / "notes.json"
    for text in ("{}", "[]", "no JSON", '{"schema": "attnspec.tuning/1", "entries": [{}]}'):
        path.write_text(text)
        with pytest.raises(TuningFileError, match="no file of measured tiles"):
            tune_files([], path, clock=FakeClock())
        assert path.read_text() == text
    with pytest.raises(TuningFileError, match="no such folder"):
        tune_files([], tmp_path / "absent" / "sm90.json", clock=FakeClock())


def test_the_plan_reads_what_tuning_writes():
    """The committed files are in the form, and in an order, that a merge keeps."""
    from dsl.resources import tuning_folder

    for path in tuning_folder().glob("*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        machine = Machine(data["gpu"], path.stem, 0, 0, "", data["triton"])
        written = json.loads(text_of(machine, read_entries(path)))
        assert sorted(data["entries"], key=str) == sorted(written["entries"], key=str)


# The command line.


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_without_a_gpu_there_is_one_line(tmp_path: Path):
    for options in ((), ("--json",), ("--tune", tmp_path / "sm90.json")):
        run = run_attnspec("bench", SPECS[0], *options)
        assert run.returncode == 2
        assert run.stderr.decode().splitlines() == ["error: no GPU: there is nothing to time on"]
        assert run.stdout == b""
    assert not list(tmp_path.iterdir())


def test_a_wrong_spec_is_reported_first(tmp_path: Path):
    path = tmp_path / "wrong.attn"
    path.write_text(DECODE.replace("bf16", "bf17"))
    run = run_attnspec("bench", path, "--json")
    assert run.returncode == 1
    assert json.loads(run.stdout)["files"][0]["diagnostics"]


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path):
    path, tuning = tmp_path / "attend.attn", tmp_path / "tuning.json"
    path.write_text(DECODE + "workload small { seqs = [4, 64]  kv_len = [128, 4096] }")
    report = bench_files([path])
    assert report.passed, report.failures
    assert all(row.mode == "graph" and 0 < row.copy_percent < 200 for row in report.rows)  # type: ignore[operator]
    (choice,) = tune_files([path], tuning).choices
    assert read_entries(tuning) == {choice.key: dict(choice.config)}
