"""A contest: functions on the inputs of one case, each checked against the oracle before it is timed in turn with all.

What was wrong, crashed or refused the case is an outcome without times; it keeps nobody else from being timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from dsl.bench.batches import Batch, Calls, Function
from dsl.bench.measure import Call, Clock, Run, Times, prepare, times
from dsl.bench.peers.work import Attention, Peer, Refused, Work, reason_against
from dsl.plan.cost import query_lengths
from dsl.verify.compare import Comparison

Status = Literal["PASSED", "INCORRECT_NUMERICAL", "RUNTIME_ERROR", "LEFT_OUT"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one contestant. There are times where `status` is PASSED, and a `problem` where it is not."""

    status: Status
    comparison: Comparison | None = None
    times: Times | None = None
    problem: str | None = None


class Entry(Protocol):
    """A contestant bound to a batch."""

    def check(self) -> Comparison: ...
    def calls(self) -> Sequence[Call]: ...
    def check_run(self, run: Call, clock: Clock) -> Comparison: ...


Entrant = Callable[[Batch], Entry]


class FunctionEntry:
    """A generated function, which writes into buffers of its own for each set of inputs."""

    def __init__(self, function: Function, batch: Batch) -> None:
        self.function = function
        self.batch = batch
        self.bound: Calls | None = None

    def check(self) -> Comparison:
        return self.batch.check(self.function)

    def calls(self) -> Sequence[Call]:
        self.bound = self.batch.calls(self.function)
        return list(self.bound)

    def check_run(self, run: Call, clock: Clock) -> Comparison:
        assert self.bound is not None, "the run that is checked is made of `calls`"
        return self.bound.check_run(run, clock)


class PeerEntry:
    """A peer, bound to each set; it allocates its results, of which the last one for the first set is kept."""

    def __init__(self, peer: Peer, batch: Batch) -> None:
        if (reason := reason_against(batch.spec)) is not None:
            raise Refused(reason)
        self.batch = batch
        self.attentions = [peer.bind(Work(batch.spec, batch.case, inputs)) for inputs in batch.sets]
        self.last: torch.Tensor | None = None

    def check(self) -> Comparison:
        return self._compare(self.attentions[0]())

    def calls(self) -> Sequence[Call]:
        return [self._keep(self.attentions[0]), *self.attentions[1:]]

    def _keep(self, attention: Attention) -> Call:
        def call() -> None:
            self.last = attention()

        return call

    def check_run(self, run: Call, clock: Clock) -> Comparison:
        assert self.last is not None, "the run that is checked is made of `calls`, and has run"
        self.last.fill_(math.nan)
        run()
        clock.synchronize()
        return self._compare(self.last)

    def _compare(self, result: torch.Tensor) -> Comparison:
        spec = self.batch.spec
        shape = (sum(query_lengths(spec, self.batch.case)), spec.heads, spec.head_dim_v)
        if result.numel() != math.prod(shape):
            raise ValueError(f"its result has the shape {list(result.shape)}, where the output's is {list(shape)}")
        return self.batch.check_rows(result.reshape(shape))


@dataclass
class _Guard:
    """A run whose error is kept, so that the others of its round go on; after it the run does nothing."""

    run: Call
    error: Exception | None = field(default=None)

    def __call__(self) -> None:
        if self.error is None:
            try:
                self.run()
            except Exception as error:
                self.error = error


@dataclass(frozen=True)
class _Started:
    """A contestant that was right when it was called alone."""

    entry: Entry
    comparison: Comparison
    run: Run
    call: Call
    guards: tuple[_Guard, _Guard]

    @property
    def error(self) -> Exception | None:
        return self.guards[0].error or self.guards[1].error


def compete(entrants: Mapping[str, Entrant], batch: Batch, clock: Clock, leader: str) -> dict[str, Outcome]:
    """The outcome of each entrant, in their order. Where the leader fails, the others are not tried and not listed."""
    outcomes: dict[str, Outcome] = {}
    started: dict[str, _Started] = {}
    for name in sorted(entrants, key=lambda name: name != leader):
        start = _start(entrants[name], batch, clock)
        if isinstance(start, _Started):
            started[name] = start
        else:
            outcomes[name] = start
            if name == leader:
                return outcomes
    runs, calls = ({name: getattr(start, part) for name, start in started.items()} for part in ("run", "call"))
    measured = times(clock, runs, calls)
    outcomes |= {name: _finish(start, measured[name], clock) for name, start in started.items()}
    return {name: outcomes[name] for name in entrants}


def _start(entrant: Entrant, batch: Batch, clock: Clock) -> _Started | Outcome:
    """Check, and make the run that will be timed."""
    try:
        entry = entrant(batch)
        found = entry.check()
        if found.problem is not None:
            return Outcome("INCORRECT_NUMERICAL", found, problem=found.problem)
        calls = entry.calls()
        run = prepare(clock, calls)
    except Refused as refusal:
        return Outcome("LEFT_OUT", problem=str(refusal))
    except Exception as error:
        return Outcome("RUNTIME_ERROR", problem=described(error))
    guards = _Guard(run.function), _Guard(calls[0])
    return _Started(entry, found, Run(run.mode, guards[0], run.count), guards[1], guards)


def _finish(start: _Started, measured: Times, clock: Clock) -> Outcome:
    """Check the very run that was timed."""
    try:
        if start.error is not None:
            raise start.error
        found = start.entry.check_run(start.guards[0].run, clock)
    except Exception as error:
        return Outcome("RUNTIME_ERROR", start.comparison, problem=described(error))
    if found.problem is not None:
        problem = f"right when called alone, but as it was timed: {found.problem}"
        return Outcome("INCORRECT_NUMERICAL", found, problem=problem)
    return Outcome("PASSED", start.comparison, measured)


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
