"""Tuning: the fastest candidate that is right wins, and a file keeps all that it held."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsl.architecture import architecture
from dsl.bench import TuneError, tune_files
from dsl.bench.candidates import candidates
from dsl.bench.measure import Machine
from dsl.bench.runner import Job
from dsl.bench.tune import tune_jobs
from dsl.bench.tuning_file import Key, TuningFileError, read_entries, read_rules, text_of
from dsl.check import load_spec
from dsl.plan import plan_module
from dsl.source import Source
from dsl.spec import SpecFile
from tests.bench_fakes import MACHINE, PREFILL, WORKLOAD, FakeClock, attend, file_of, job_of
from tests.conftest import DECODE, ROOT, SPECS, run_attnspec


def tunable(file: SpecFile, clock: FakeClock, seconds: Callable[[dict[str, int]], float | Exception | None]) -> Job:
    """A block whose function takes what `seconds` says of its tiles: raises an exception, and is wrong for None."""
    (block,) = plan_module(file).blocks
    record = SimpleNamespace(unfit={}, configs={name: dict(config.entries) for name, config in block.configs.items()})

    right = attend(file, clock, 0.0)

    def function(*tensors: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        found = seconds(record.configs.get("sm90", record.configs["default"]))
        if isinstance(found, Exception):
            raise found
        clock.spend(found or 1e-6)
        result = right(*tensors, out=out)
        return result.mul_(2) if found is None else result

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
    (choice,) = tune_jobs([job], clock, lambda line: None)
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


def test_how_work_is_shared_out_is_kept(tmp_path: Path):
    """A run that measures tiles keeps what it does not measure."""
    path = tmp_path / "sm90.json"
    times = {"turn": [0.5, 1.0], "item": [4.0, 5.0], "merge": 3.0}
    rules = {"work_times": times, "decode_work": {"programs": 6}}
    path.write_text(text_of(MACHINE, {}, rules))
    assert read_rules(path) == rules
    path.write_text(text_of(MACHINE, read_entries(path), read_rules(path)))
    assert read_rules(path) == rules
    path.write_text(text_of(MACHINE, {}))
    assert read_rules(path) == {} and "work" not in path.read_text()


def test_only_portable_kernels_are_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On Hopper another kernel would run in their place, whatever the tiles."""
    seen: list[Job] = []

    def watched(work: list[Job], *rest: Any) -> tuple[Any, ...]:
        seen.extend(work)
        return ()

    monkeypatch.setattr("dsl.bench.tune.tune_jobs", watched)
    tune_files([ROOT / "specs" / "prefill.attn"], tmp_path / "sm90.json", clock=FakeClock())
    assert seen and not any(hasattr(job.module, "_plan_tiles") for job in seen)


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


# Where the tiles are kept.


def tuned_by(monkeypatch: pytest.MonkeyPatch, during: Callable[[], object] = lambda: None) -> Key:
    """Make tuning choose one entry without timing; `during` happens while it is at it."""
    from dsl.bench.tuning import Choice

    key = Key("prefill", 2, 24, 1)

    def tune(*_: object) -> tuple[Choice, ...]:
        during()
        return (Choice(key, ("small",), {"BLOCK_Q": 64}, 1.5, 3, ()),)

    monkeypatch.setattr("dsl.bench.tune.tune_jobs", tune)
    return key


def test_without_a_file_the_plans_own_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dsl.bench.tune.tuning_folder", lambda: tmp_path)
    key, kept = tuned_by(monkeypatch), Key("decode", 2, 64, 4)
    path = tmp_path / "sm90.json"
    path.write_text(text_of(MACHINE, {kept: {"TILE": 16}}))
    tuning = tune_files([Source.from_text(PREFILL, "attend.attn")], clock=FakeClock())
    assert tuning.file == path
    assert read_entries(path) == {kept: {"TILE": 16}, key: {"BLOCK_Q": 64}}
    data = tuning.to_dict()
    assert (data["schema"], data["file"]) == ("attnspec.tune/2", str(path))
    assert json.loads(json.dumps(data))["choices"][0]["key"] == key._asdict()


def test_what_another_run_writes_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, other = tmp_path / "tiles.json", Key("decode", 2, 64, 4)
    key = tuned_by(monkeypatch, lambda: path.write_text(text_of(MACHINE, {other: {"TILE": 16}})))
    tune_files([Source.from_text(PREFILL, "attend.attn")], path, clock=FakeClock())
    assert read_entries(path) == {other: {"TILE": 16}, key: {"BLOCK_Q": 64}}


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tuned_by(monkeypatch, lambda: pytest.fail("timed"))
    source = Source.from_text(PREFILL, "attend.attn")
    with pytest.raises(IsADirectoryError):
        tune_files([source], tmp_path, clock=FakeClock())
    monkeypatch.setattr("dsl.bench.tune.check_writable", refuse)
    with pytest.raises(PermissionError):
        tune_files([source], tmp_path / "tiles.json", clock=FakeClock())


def refuse(path: Path) -> None:
    raise PermissionError(13, "Permission denied", str(path))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda entries: entries.append(entries[0]), "has two entries for family decode"),
        (lambda entries: entries[0].update(softmax="online"), "has what tune does not know: softmax"),
    ],
    ids=["repeated", "unknown field"],
)
def test_what_would_be_lost_is_refused(change: Callable[[list], object], said: str, tmp_path: Path):
    path = tmp_path / "tiles.json"
    data = json.loads(text_of(MACHINE, {Key("decode", 2, 64, 4): {"TILE": 16}}))
    change(data["entries"])
    path.write_text(json.dumps(data))
    with pytest.raises(TuningFileError, match=said):
        tune_files([], path, clock=FakeClock())
    assert json.loads(path.read_text()) == data


# The command line.


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_without_a_gpu_there_is_one_line_or_one_object(tmp_path: Path):
    options = ("-o", tmp_path / "sm90.json")
    plain = run_attnspec("tune", SPECS[0], *options)
    assert (plain.returncode, plain.stdout) == (2, b"")
    assert plain.stderr.decode().splitlines() == ["error: no GPU: there is nothing to time on"]
    answer = run_attnspec("tune", SPECS[0], *options, "--json")
    assert (answer.returncode, answer.stderr) == (2, b"")
    error = "no GPU: there is nothing to time on"
    assert json.loads(answer.stdout) == {"schema": "attnspec.tune/2", "choices": [], "error": error}
    assert not list(tmp_path.iterdir())


def test_a_wrong_spec_is_reported_first():
    run = run_attnspec("tune", "-", "--name", "piped.attn", "--json", input=DECODE.replace("bf16", "bf17").encode())
    assert (run.returncode, run.stderr) == (1, b"")
    answer = json.loads(run.stdout)
    assert answer["schema"] == "attnspec.tune/2"
    assert answer["files"][0]["diagnostics"][0]["file"] == "piped.attn"


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path):
    path, tiles = tmp_path / "attend.attn", tmp_path / "tuning.json"
    path.write_text(DECODE + "workload small { seqs = [4, 64]  kv_len = [128, 4096] }")
    (choice,) = tune_files([path], tiles).choices
    assert read_entries(tiles) == {choice.key: dict(choice.config)}
