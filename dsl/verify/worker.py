"""One spec file's verification, in a process of its own: a module that crashes takes nobody with it.

Reads a request as JSON from stdin, writes a record as JSON to stdout for each row, each behind a record separator, so
that whatever else a kernel prints does no harm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from dsl.check import load_spec
from dsl.load import load
from dsl.source import Source
from dsl.spec import Spec, SpecFile
from dsl.verify.cases import Trial, trials
from dsl.verify.compare import Expected, compare, expect
from dsl.verify.inputs import Inputs, make_inputs
from dsl.verify.report import Row
from dsl.verify.sequences import sequences

SEPARATOR = "\x1e"
_REFERENCE_BYTES = 4 << 30
"""The plain PyTorch reference holds a sequence's scores at once; beyond this it is not asked."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the parent asks for: a spec's name and text, and its module.

    `only` names attention blocks and dispatches; None means all.
    """

    name: str
    text: str
    module: str
    device: str
    only: list[str] | None = None


def main() -> None:
    request = Request(**json.loads(sys.stdin.read()))
    if request.device == "cpu":
        from dsl.verify.interpreter import repair

        repair()
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="numpy|triton")
    file = load_spec(Source.from_text(request.text, request.name))
    with np.errstate(all="ignore"):
        for row in verify_module(load(request.module), file, request.device, request.only):
            print(f"{SEPARATOR}{json.dumps(dataclasses.asdict(row))}", flush=True)


def verify_module(module: ModuleType, file: SpecFile, device: str, only: list[str] | None = None) -> Iterator[Row]:
    """Every function of a module on every batch of its blocks, the plain reference included."""
    for spec in file.attentions:
        dispatches = [dispatch.name for dispatch in file.dispatches if spec.name in dispatch.blocks]
        for trial in trials(spec, file.workloads, "small" if device == "cpu" else "large"):
            names = [spec.name, *(dispatches if trial.dispatched else ())]
            wanted = [name for name in names if only is None or name in only]
            yield from _verify_trial(module, file, spec, trial, wanted, device)


def _verify_trial(
    module: ModuleType, file: SpecFile, spec: Spec, trial: Trial, names: list[str], device: str
) -> Iterator[Row]:
    expected = None
    for name in names:
        inputs = make_inputs(spec, trial.case, device, adversity=trial.adversity)
        expected = expected or expect(spec, inputs)
        function = getattr(module, name, None)
        yield _row(file, spec, trial, name, inputs, expected, function, inputs.outputs)
        if name == spec.name and _score_bytes(spec, inputs) <= _REFERENCE_BYTES:
            reference = getattr(function, "reference", None)
            yield _row(file, spec, trial, f"{name}.reference", inputs, expected, reference, {})


def _score_bytes(spec: Spec, inputs: Inputs) -> int:
    return max((4 * spec.heads * part.q_len * part.kv_len for part in sequences(spec, inputs)), default=0)


def _row(
    file: SpecFile,
    spec: Spec,
    trial: Trial,
    name: str,
    inputs: Inputs,
    expected: Expected,
    function: Callable[..., Any] | None,
    outputs: dict[str, torch.Tensor],
) -> Row:
    """Call one function and judge what it returns; an exception is a finding like any other."""
    place = (file.source.name, name, spec.name, trial.name, str(trial.adversity))
    start = time.perf_counter()
    try:
        if function is None:
            raise LookupError(f"the module has no {name}")
        with _uninitialised_memory_is_nan():
            result = function(*inputs.positional, **inputs.keywords, **outputs)
        if inputs[spec.arguments[0]].is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        out, lse = result if spec.lse else (result, None)
        is_gpu = inputs[spec.arguments[0]].is_cuda
        found = compare(spec, expected, out, lse, fast_tanh=is_gpu)
        problem = _broken_promise(inputs, out, outputs) or found.problem
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return Row(*place, passed=False, seconds=time.perf_counter() - start, problem=text)
    return Row(
        *place,
        passed=problem is None,
        seconds=seconds,
        error=found.error,
        bar=found.bar,
        row_error=found.row_error,
        row_bar=found.row_bar,
        lse_error=found.lse_error,
        lse_bar=found.lse_bar if found.lse_error is not None else None,
        problem=problem,
    )


def _broken_promise(inputs: Inputs, out: torch.Tensor, outputs: dict[str, torch.Tensor]) -> str | None:
    if not outputs:
        return None
    if out.data_ptr() != outputs["out"].data_ptr():
        return "out= was given, and something else was returned"
    if not inputs.is_intact:
        return "memory beside the output buffer was written"
    return None


@contextlib.contextmanager
def _uninitialised_memory_is_nan() -> Iterator[None]:
    """Within, `torch.empty` gives NaN, so that an output or scratch that is read before it is written shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=UserWarning)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


if __name__ == "__main__":
    main()
