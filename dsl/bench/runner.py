"""Bench spec files: build each one's module, check each block against the oracle, and time it on its workload."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType

from dsl.bench.batches import batch
from dsl.bench.contest import Entrant, FunctionEntry, Outcome, PeerEntry, compete, described
from dsl.bench.measure import Ceilings, Clock, Times, ceilings
from dsl.bench.peers import Peers
from dsl.bench.peers.work import Peer
from dsl.bench.report import Beside, Report, Row, Shape
from dsl.check import load_spec
from dsl.load import load
from dsl.pipeline import module_name, read_source
from dsl.plan import plan_module
from dsl.plan.cost import case_title, cost, query_lengths
from dsl.render import render
from dsl.source import Source
from dsl.spec import Case, Spec, SpecFile

Subject = str | Path | Source
"""A spec file by its path, or its text where it was read already."""

_OURS, _ONLINE = "ours", "online"
_NO_PEERS = Peers()


@dataclass(frozen=True)
class Job:
    """One block of one file, its module, and the cases that it is timed on.

    `online` is the same block under `softmax = online`, where that is another text.
    """

    file: SpecFile
    module: ModuleType
    spec: Spec
    cases: tuple[Case, ...]
    online: ModuleType | None = None


def bench_files(
    subjects: Sequence[Subject],
    *,
    only: Collection[str] | None = None,
    progress: Callable[[Row], None] | None = None,
    clock: Clock | None = None,
    peers: Peers = _NO_PEERS,
) -> Report:
    """Time every block of some spec files on its workload, and the peers that can take it beside it.

    A block that is wrong or crashes is a failed row without times, not an exception. `only` names the blocks, or the
    dispatches whose blocks, are wanted; `dsl.bench.peers.find` finds peers. Raises NoGpu, and what
    `dsl.pipeline.build` raises.
    """
    clock = clock or gpu()
    with tempfile.TemporaryDirectory() as folder:
        work, unknown = jobs(subjects, folder, only)
        limits = ceilings(clock, list(dict.fromkeys(job.spec.dtype for job in work if job.cases)))
        rows = [Row("", name, "", "RUNTIME_ERROR", problem="no block or dispatch has that name") for name in unknown]
        for place, job in enumerate(work):
            online = online_module(job.file, job.spec, Path(folder) / f"online_{place}") if job.cases else None
            for row in bench_block(replace(job, online=online), clock, limits, peers.of(job.spec.family)):
                rows.append(row)
                if progress is not None:
                    progress(row)
    idle = tuple(f"{job.spec.name} of {job.file.source.name} has no workload" for job in work if not job.cases)
    origins = {name: peer.origin for name, peer in peers.found.items()}
    return Report(clock.machine, limits, tuple(rows), idle, origins, peers.absent)


def gpu() -> Clock:
    """The real clock. Raises NoGpu."""
    from dsl.bench.timing import Gpu

    return Gpu()


def jobs(
    subjects: Sequence[Subject],
    folder: str,
    only: Collection[str] | None,
    targets: Sequence[str] | None = None,
) -> tuple[list[Job], list[str]]:
    """The wanted blocks with modules that are built in `folder`, and the wanted names that no file has."""
    found: list[Job] = []
    unknown = list(only or ())
    for place, subject in enumerate(subjects):
        source = subject if isinstance(subject, Source) else read_source(subject)
        file = load_spec(source)
        module = _module(render(plan_module(file, targets)), Path(folder) / str(place), module_name(source.name))
        functions = {spec.name: (spec.name,) for spec in file.attentions}
        functions |= {dispatch.name: dispatch.blocks for dispatch in file.dispatches}
        unknown = [name for name in unknown if name not in functions]
        wanted = {block for name, blocks in functions.items() if only is None or name in only for block in blocks}
        for spec in file.attentions:
            if spec.name in wanted:
                cases = (case for workload in file.workloads if workload.block == spec.name for case in workload.cases)
                found.append(Job(file, module, spec, tuple(cases)))
    return found, unknown


def online_module(file: SpecFile, spec: Spec, folder: Path) -> ModuleType | None:
    """A module of the block alone under `softmax = online`; None where the block is printed so already."""
    alone, online = (
        render(plan_module(replace(file, attentions=(block,), dispatches=(), workloads=())))
        for block in (spec, replace(spec, softmax="online"))
    )
    return None if alone == online else _module(online, folder, module_name(file.source.name))


def _module(text: str, folder: Path, stem: str) -> ModuleType:
    folder.mkdir(parents=True)
    path = folder / f"{stem}.py"
    path.write_text(text, encoding="utf-8")
    return load(path)


def bench_block(job: Job, clock: Clock, limits: Ceilings, peers: Mapping[str, Peer] | None = None) -> Iterator[Row]:
    """One row for each case."""
    for case in job.cases:
        needs = cost(job.spec, case)
        row = Row(
            job.file.source.name,
            job.spec.name,
            case_title(job.spec, case),
            "RUNTIME_ERROR",
            needs.bytes,
            needs.flops,
            shape=_shape(job.spec, case),
        )
        try:
            outcomes = compete(_entrants(job, peers or {}), batch(job.spec, case, clock), clock, leader=_OURS)
            yield _with_outcomes(row, outcomes, limits.copy, limits.matmul[job.spec.dtype])
        except Exception as error:
            yield replace(row, problem=described(error))


def _shape(spec: Spec, case: Case) -> Shape:
    return Shape(
        family=spec.family,
        dtype=spec.dtype,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim_qk=spec.head_dim_qk,
        head_dim_v=spec.head_dim_v,
        seqs=len(case.kv_lens),
        q_tokens=sum(query_lengths(spec, case)),
        kv_tokens=sum(case.kv_lens),
    )


def _entrants(job: Job, peers: Mapping[str, Peer]) -> dict[str, Entrant]:
    """Ours first; a peer's name is never one of ours."""
    modules = {_OURS: job.module, _ONLINE: job.online}
    ours = {name: getattr(module, job.spec.name) for name, module in modules.items() if module is not None}
    entrants: dict[str, Entrant] = {name: partial(FunctionEntry, function) for name, function in ours.items()}
    return entrants | {name: partial(PeerEntry, peer) for name, peer in peers.items()}


def _with_outcomes(row: Row, outcomes: Mapping[str, Outcome], copy: float, matmul: float) -> Row:
    """The row with our times if we were right, and with everybody else's."""
    ours = outcomes[_OURS]
    if ours.comparison is not None:
        row = replace(row, error=ours.comparison.error, bar=ours.comparison.bar)
    if ours.times is None:
        return replace(row, status=ours.status, problem=ours.problem)
    online = outcomes.get(_ONLINE)
    if online is not None and online.times is None:
        return replace(row, status=online.status, problem=f"under softmax = online: {online.problem}")
    others = {name: _beside(row, outcome) for name, outcome in outcomes.items() if name != _OURS}
    row = replace(row, online=others.pop(_ONLINE, None), peers=others)
    best = min((peer.us for peer in others.values() if peer.us is not None), default=None)
    ratio = None if best is None else best / (1e6 * ours.times.median)
    return replace(_with_times(row, ours.times, copy, matmul), ratio=ratio)


def _beside(row: Row, outcome: Outcome) -> Beside:
    error = None if outcome.comparison is None else outcome.comparison.error
    if outcome.times is None:
        return Beside(outcome.status, error=error, problem=outcome.problem)
    seconds = outcome.times.median
    return Beside(
        "PASSED",
        outcome.times.mode,
        1e6 * seconds,
        1e6 * outcome.times.eager,
        row.bytes / seconds / 1e12,
        row.flops / seconds / 1e12,
        error,
    )


def _with_times(row: Row, measured: Times, copy: float, matmul: float) -> Row:
    bandwidth, throughput = row.bytes / measured.median, row.flops / measured.median
    return replace(
        row,
        status="PASSED",
        mode=measured.mode,
        latency_us=1e6 * measured.median,
        p20_us=1e6 * measured.p20,
        p80_us=1e6 * measured.p80,
        eager_us=1e6 * measured.eager,
        tb_per_s=bandwidth / 1e12,
        tflop_per_s=throughput / 1e12,
        copy_percent=100 * bandwidth / copy,
        matmul_percent=100 * throughput / matmul,
    )
