"""A clock that only counts what functions say they take, and functions for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from dsl.bench.measure import Call, Ceilings, Machine
from dsl.bench.runner import Job
from dsl.check import load_spec
from dsl.source import Source
from dsl.spec import SpecFile
from dsl.verify.oracle import oracle

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
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def function(*tensors: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        clock.spend(seconds)
        if id(tensors[0]) not in known:
            right = oracle(spec, dict(zip(spec.arguments, tensors, strict=True)))[0].to(tensors[0].dtype)
            known[id(tensors[0])] = tensors[0], right
        result = known[id(tensors[0])][1]
        result = 2 * result if fault(next(counts)) else result
        return result.clone() if out is None else out.copy_(result)

    return function


def job_of(file: SpecFile, **members: Any) -> Job:
    (spec,) = file.attentions
    return Job(file, SimpleNamespace(**members), spec, file.workloads[0].cases)  # type: ignore[arg-type]
