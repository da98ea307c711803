"""Bench spec files: build each one's module, check each block against the oracle, and time it on its workload."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from dsl.bench.batches import Function, batch
from dsl.bench.measure import Ceilings, Clock, Times, ceilings, prepare, times
from dsl.bench.report import Report, Row
from dsl.check import load_spec
from dsl.load import load
from dsl.pipeline import build
from dsl.plan.cost import case_title, cost
from dsl.source import Source
from dsl.spec import Case, Spec, SpecFile


@dataclass(frozen=True)
class Job:
    """One block of one file, its module, and the cases that it is timed on."""

    file: SpecFile
    module: ModuleType
    spec: Spec
    cases: tuple[Case, ...]


def bench_files(
    paths: Sequence[str | Path],
    *,
    only: Collection[str] | None = None,
    progress: Callable[[Row], None] | None = None,
    clock: Clock | None = None,
) -> Report:
    """Time every block of some spec files on its workload.

    A block that is wrong or crashes is a failed row without times, not an exception. `only` names the blocks, or the
    dispatches whose blocks, are wanted. Raises NoGpu, and what `dsl.pipeline.build` raises.
    """
    clock = clock or _gpu()
    with tempfile.TemporaryDirectory() as folder:
        work, unknown = jobs(paths, folder, only)
        limits = ceilings(clock, list(dict.fromkeys(job.spec.dtype for job in work if job.cases)))
        rows = [Row("", name, "", "RUNTIME_ERROR", problem="no block or dispatch has that name") for name in unknown]
        for job in work:
            for row in bench_block(job, clock, limits):
                rows.append(row)
                if progress is not None:
                    progress(row)
    idle = tuple(f"{job.spec.name} of {job.file.source.name} has no workload" for job in work if not job.cases)
    return Report(clock.machine, limits, tuple(rows), idle)


def _gpu() -> Clock:
    from dsl.bench.timing import Gpu

    return Gpu()


def jobs(paths: Sequence[str | Path], folder: str, only: Collection[str] | None) -> tuple[list[Job], list[str]]:
    """The wanted blocks with modules that are built in `folder`, and the wanted names that no file has."""
    found: list[Job] = []
    unknown = list(only or ())
    for place, path in enumerate(paths):
        file = load_spec(Source.read(path))
        module = load(build(path, Path(folder) / str(place)))
        functions = {spec.name: (spec.name,) for spec in file.attentions}
        functions |= {dispatch.name: dispatch.blocks for dispatch in file.dispatches}
        unknown = [name for name in unknown if name not in functions]
        wanted = {block for name, blocks in functions.items() if only is None or name in only for block in blocks}
        for spec in file.attentions:
            if spec.name in wanted:
                cases = (case for workload in file.workloads if workload.block == spec.name for case in workload.cases)
                found.append(Job(file, module, spec, tuple(cases)))
    return found, unknown


def bench_block(job: Job, clock: Clock, limits: Ceilings) -> Iterator[Row]:
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
        )
        try:
            yield _timed(row, job.spec, case, getattr(job.module, job.spec.name), clock, limits)
        except Exception as error:
            yield replace(row, problem=f"{type(error).__name__}: {error}")


def _timed(row: Row, spec: Spec, case: Case, function: Function, clock: Clock, limits: Ceilings) -> Row:
    """The row with times if the function is right, before it is timed and in the run that was timed."""
    inputs = batch(spec, case, clock)
    found = inputs.check(function)
    row = replace(row, error=found.error, bar=found.bar, problem=found.problem)
    if found.problem is not None:
        return replace(row, status="INCORRECT_NUMERICAL")
    calls = inputs.calls(function)
    sequence = list(calls)
    run = prepare(clock, sequence)
    measured = times(clock, run, sequence[0])
    found = calls.check_run(run.function, clock)
    if found.problem is not None:
        problem = f"right when called alone, but as it was timed: {found.problem}"
        return replace(row, status="INCORRECT_NUMERICAL", error=found.error, problem=problem)
    return _with_times(row, measured, limits.copy, limits.matmul[spec.dtype])


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
