"""Tune: which of the candidate tiles are fastest on this GPU, for blocks that would share an entry together."""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsl.architecture import Architecture, architecture
from dsl.bench.batches import Batch, Function, batch
from dsl.bench.candidates import candidates
from dsl.bench.measure import Call, Clock, Run, interleaved, prepare
from dsl.bench.runner import Job, Subject, gpu, jobs
from dsl.bench.tuning import Choice, Tiles, Tuning, shown
from dsl.bench.tuning_file import Key, key_of, read_entries, read_rules, text_of
from dsl.emit import check_writable, replace_file
from dsl.plan.refuse import BASE
from dsl.resources import tuning_folder

ROUNDS = 9


class TuneError(Exception):
    """Nothing could be tuned: no candidate of some block runs, or nothing was asked for."""


@dataclass
class _Contest:
    """The blocks of one key: seconds by candidate, one number for each case, and why candidates were left out."""

    cases: int = 0
    seconds: dict[Tiles, list[float]] = field(default_factory=dict)
    skipped: dict[Tiles, str] = field(default_factory=dict)
    planned: list[Tiles | None] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)

    def skip(self, tiles: Tiles, reason: str) -> None:
        self.skipped.setdefault(tiles, f"{shown(tiles)}: {reason}")


def tune_files(
    subjects: Sequence[Subject],
    file: str | Path | None = None,
    *,
    only: Collection[str] | None = None,
    progress: Callable[[str], None] | None = None,
    clock: Clock | None = None,
) -> Tuning:
    """Time the candidate tiles of every block on its workload, and keep the best in `file`, beside what it holds.

    Without a `file` it is the one that the plan reads for this GPU. Raises NoGpu, TuneError, TuningFileError, OSError,
    and what `dsl.pipeline.build` raises; then nothing is written, and where the file is at fault nothing was timed.
    """
    if file is not None:
        _check_file(Path(file))
    clock = clock or gpu()
    path = tuning_folder() / f"{clock.machine.architecture}.json" if file is None else Path(file)
    _check_file(path)
    with tempfile.TemporaryDirectory() as folder:
        # The tiles of the portable kernels are what is tuned: no other kernel may run in their place.
        work, unknown = jobs(subjects, folder, only, targets=(BASE,))
        if unknown:
            raise TuneError(f"no block or dispatch has the name {' or '.join(unknown)}")
        choices = tune_jobs(work, clock, progress or (lambda line: None))
    chosen = {choice.key: dict(choice.config) for choice in choices}
    replace_file(path, text_of(clock.machine, read_entries(path) | chosen, read_rules(path)))
    return Tuning(clock.machine, choices, path)


def _check_file(path: Path) -> None:
    """Refuse a file that could not be written in the end, or is another's. Raises OSError or TuningFileError."""
    read_entries(path)
    check_writable(path)


def tune_jobs(work: Sequence[Job], clock: Clock, progress: Callable[[str], None]) -> tuple[Choice, ...]:
    """The best candidate of each key. Raises TuneError where a key has none."""
    try:
        chip = architecture(clock.machine.architecture)
    except KeyError as error:
        name = clock.machine.architecture
        raise TuneError(f"the plan does not know {name}, and would not read what is measured on it") from error
    contests: dict[Key, _Contest] = {}
    for job in work:
        if job.cases:
            progress(f"tuning {job.spec.name} of {job.file.source.name}")
            _compete(job, chip, clock, contests.setdefault(key_of(job.spec), _Contest()))
    if not contests:
        raise TuneError("nothing to tune: no block that was asked for has a workload")
    return tuple(_choice(key, contests[key]) for key in sorted(contests))


def _compete(job: Job, chip: Architecture, clock: Clock, contest: _Contest) -> None:
    """Time every candidate on every case of a block, in turns."""
    record = getattr(job.module, f"_{job.spec.name}_block")
    function = getattr(job.module, job.spec.name)
    entrants = _entrants(job, chip, record, contest)
    contest.blocks.append(job.spec.name)
    for case in job.cases:
        inputs = batch(job.spec, case, clock)
        runs: dict[Tiles, Run] = {}
        for tiles, entries in entrants.items():
            if tiles in contest.skipped:
                continue
            try:
                runs[tiles] = _Entry(function, record, chip.name, entries).prepare(inputs, clock)
            except _Wrong as error:
                contest.skip(tiles, str(error))
            except Exception as error:
                contest.skip(tiles, f"{type(error).__name__}: {error}")
        contest.cases += 1
        for tiles, seconds in interleaved(clock, runs, ROUNDS).items():
            contest.seconds.setdefault(tiles, []).append(statistics.median(seconds))


def _entrants(job: Job, chip: Architecture, record: Any, contest: _Contest) -> dict[Tiles, Mapping[str, int]]:
    """The plan's own tiles, and the candidates that the plan would take on the chip."""
    entrants: dict[Tiles, Mapping[str, int]] = {}
    planned = None
    if chip.name not in record.unfit:
        entries = dict(record.configs.get(chip.name, record.configs["default"]))
        planned = _tiles(entries)
        entrants[planned] = entries
    contest.planned.append(planned)
    for config in candidates(job.spec, chip):
        tiles = _tiles(config.entries)
        if config.shared_bytes <= chip.shared_bytes:
            entrants[tiles] = config.entries
        elif tiles not in entrants:
            needs = f"needs up to {config.shared_bytes} bytes of shared memory, {chip.name} has {chip.shared_bytes}"
            contest.skip(tiles, needs)
    return entrants


def _tiles(entries: Mapping[str, int]) -> Tiles:
    """The numbers that a tuning file keeps; the plan derives CHUNK from the layout."""
    return tuple((name, size) for name, size in entries.items() if name != "CHUNK")


class _Wrong(Exception):
    """A candidate that computes something else."""


@dataclass(frozen=True)
class _Entry:
    """A function of a module that runs with other tiles than the plan's."""

    function: Function
    record: Any
    architecture: str
    tiles: Mapping[str, int]

    def __call__(self, *tensors: Any, **keywords: Any) -> Any:
        with self._tiles_in_place():
            return self.function(*tensors, **keywords)

    def prepare(self, inputs: Batch, clock: Clock) -> Run:
        """Check the candidate, and make the run that is timed. Raises _Wrong, or what compiling it raises."""
        found = inputs.check(self)
        if found.problem is not None:
            raise _Wrong(found.problem)
        calls: list[Call] = list(inputs.calls(self))
        return prepare(clock, calls)

    @contextlib.contextmanager
    def _tiles_in_place(self) -> Iterator[None]:
        configs, name = self.record.configs, self.architecture
        before = configs.get(name)
        configs[name] = dict(self.tiles)
        try:
            yield
        finally:
            if before is None:
                del configs[name]
            else:
                configs[name] = before


def _choice(key: Key, contest: _Contest) -> Choice:
    """The candidate that is closest to the best of each case, by the geometric mean over all cases."""
    complete = {tiles: seconds for tiles, seconds in contest.seconds.items() if len(seconds) == contest.cases}
    if not complete:
        reasons = "\n".join(f"  {reason}" for reason in contest.skipped.values())
        raise TuneError(f"no candidate runs {' or '.join(contest.blocks)}:\n{reasons}")
    means = {tiles: statistics.fmean(map(math.log, seconds)) for tiles, seconds in complete.items()}
    best = min(means, key=lambda tiles: (means[tiles], tiles))
    planned = contest.planned[0]
    gain = math.exp(means[planned] - means[best]) if planned in means and len(set(contest.planned)) == 1 else None
    skipped = tuple(contest.skipped.values())
    return Choice(key, tuple(contest.blocks), dict(best), gain, len(complete), skipped)
