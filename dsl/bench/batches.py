"""The batches that are timed: enough sets of inputs that the L2 cache holds none of them by its next turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dsl.bench.measure import Call, Clock
from dsl.plan.cost import cost
from dsl.spec import Case, Spec
from dsl.verify.compare import Comparison, Expected, compare, expect
from dsl.verify.inputs import Inputs, make_inputs
from dsl.verify.layouts import to_physical
from dsl.verify.oracle import QUERY_AXES

MOST_SETS = 64
"""Of tiny inputs more would not matter: the cache is flushed before each run, and a run takes each set once."""

Function = Callable[..., Any]


@dataclass(frozen=True)
class Batch:
    """One case as several sets of inputs, and what the oracle expects of the first."""

    spec: Spec
    case: Case
    sets: tuple[Inputs, ...]
    expected: Expected

    def check(self, function: Function) -> Comparison:
        """What the function gives for the first set, beside the oracle's answer."""
        return self._compare(function(*self.sets[0].positional, **self.sets[0].keywords))

    def check_rows(self, rows: torch.Tensor) -> Comparison:
        """A result `[row, head, dim]` for the first set, without a log-sum-exp, beside the oracle's answer."""
        spec = self.spec
        out = to_physical(rows, spec.out_layout, QUERY_AXES[spec.family])
        return compare(spec, self.expected, out, None, fast_tanh=out.is_cuda)

    def calls(self, function: Function) -> Calls:
        """One call for each set, into buffers of its own."""
        return Calls(self, function, tuple(self._buffers(inputs, function) for inputs in self.sets))

    def _buffers(self, inputs: Inputs, function: Function) -> dict[str, torch.Tensor]:
        result = function(*inputs.positional, **inputs.keywords)
        return {"out": result[0], "out_lse": result[1]} if self.spec.lse else {"out": result}

    def _compare(self, result: Any) -> Comparison:
        out, lse = result if self.spec.lse else (result, None)
        return compare(self.spec, self.expected, out, lse, fast_tanh=out.is_cuda)


@dataclass(frozen=True)
class Calls:
    """A function bound to each set of a batch; what it wrote for the first set can be checked after it was timed."""

    batch: Batch
    function: Function
    buffers: tuple[dict[str, torch.Tensor], ...]

    def __iter__(self) -> Iterator[Call]:
        for inputs, buffers in zip(self.batch.sets, self.buffers, strict=True):
            yield lambda inputs=inputs, buffers=buffers: self.function(*inputs.positional, **inputs.keywords, **buffers)

    def check_run(self, run: Call, clock: Clock) -> Comparison:
        """Whether the very run that was timed computes the first set."""
        for tensor in self.buffers[0].values():
            tensor.fill_(math.nan)
        run()
        clock.synchronize()
        return self.batch._compare(tuple(self.buffers[0].values()) if self.batch.spec.lse else self.buffers[0]["out"])


def batch(spec: Spec, case: Case, clock: Clock) -> Batch:
    """Plain random inputs for a case, twice the L2 cache in all, and the oracle's answer."""
    count = min(MOST_SETS, max(1, -(-2 * clock.machine.l2_bytes // max(cost(spec, case).bytes, 1))))
    generator = torch.Generator(clock.device).manual_seed(0)
    sets = tuple(make_inputs(spec, case, clock.device, generator) for _ in range(count))
    return Batch(spec, case, sets, expect(spec, sets[0]))
