"""From a clock to numbers: which calls make one run, how often it is timed, and what of it is reported.

Short calls are timed inside a CUDA graph, where no launch overhead hides the kernel; runs that are compared take turns,
so that a drifting frequency hits them all alike; what is reported is a median.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

Call = Callable[[], object]
Mode = Literal["graph", "eager"]
Key = TypeVar("Key")

GRAPH_SECONDS = 1e-3
"""Calls that take longer are not put into a graph: a launch is nothing beside them."""
CALLS = 20
ROUNDS = 21
_EAGER_SECONDS = 0.02
_EAGER_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Machine:
    """What the times were measured on and with."""

    gpu: str
    architecture: str
    processors: int
    l2_bytes: int
    torch: str
    triton: str


class Clock(Protocol):
    """What measuring needs of a GPU; `dsl.bench.timing.Gpu` is the real one."""

    device: str
    machine: Machine

    def synchronize(self) -> None: ...
    def sample(self, run: Call) -> float: ...
    def wall(self, call: Call, times: int) -> float: ...
    def capture(self, calls: Sequence[Call]) -> Call: ...
    def copy(self) -> tuple[Call, int]: ...
    def matmul(self, dtype: str) -> tuple[Call, int]: ...


@dataclass(frozen=True, slots=True)
class Run:
    """What is timed at once: `count` calls, one after another."""

    mode: Mode
    function: Call
    count: int


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one call: on the device, and as a caller in Python sees it."""

    median: float
    p20: float
    p80: float
    eager: float
    mode: Mode


def prepare(clock: Clock, calls: Sequence[Call]) -> Run:
    """A run over all calls, which work on inputs of their own: in a graph where they are short."""
    calls[0]()
    if clock.sample(calls[0]) < GRAPH_SECONDS:
        sequence = [*calls] * -(-CALLS // len(calls))
        return Run("graph", clock.capture(sequence), len(sequence))

    def loop() -> None:
        for call in calls:
            call()

    return Run("eager", loop, len(calls))


def interleaved(clock: Clock, runs: Mapping[Key, Run], rounds: int = ROUNDS) -> dict[Key, list[float]]:
    """Seconds of one call of each run, sorted, the runs taking turns."""
    samples: dict[Key, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        clock.sample(run.function)
    for _ in range(rounds):
        for name, run in runs.items():
            samples[name].append(clock.sample(run.function) / run.count)
    return {name: sorted(seconds) for name, seconds in samples.items()}


def times(clock: Clock, runs: Mapping[Key, Run], calls: Mapping[Key, Call]) -> dict[Key, Times]:
    """The times of runs that take turns, and of one call of each in a loop in Python."""
    result: dict[Key, Times] = {}
    for name, seconds in interleaved(clock, runs).items():
        p20, p80 = (seconds[round(share * (len(seconds) - 1))] for share in (0.2, 0.8))
        median = statistics.median(seconds)
        result[name] = Times(median, p20, p80, _eager(clock, calls[name], median), runs[name].mode)
    return result


def _eager(clock: Clock, call: Call, expected: float) -> float:
    count = max(3, min(300, int(_EAGER_SECONDS / max(expected, 1e-9))))
    clock.wall(call, 3)
    return statistics.median(clock.wall(call, count) / count for _ in range(_EAGER_ROUNDS))


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this machine reaches where only memory, or only arithmetic, is asked for: bytes and FLOPs a second."""

    copy: float
    matmul: Mapping[str, float]


def ceilings(clock: Clock, dtypes: Sequence[str]) -> Ceilings:
    """Measure the ceilings for these dtypes."""
    return Ceilings(_rate(clock, *clock.copy()), {dtype: _rate(clock, *clock.matmul(dtype)) for dtype in dtypes})


def _rate(clock: Clock, call: Call, work: int) -> float:
    call()
    return work / statistics.median(interleaved(clock, {"": Run("eager", call, 1)})[""])
