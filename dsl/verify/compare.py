"""A result beside the oracle's: how far apart they are, and how far apart they may be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dsl.expr.tree import Call, Expression
from dsl.spec import Spec
from dsl.verify.inputs import Inputs
from dsl.verify.oracle import lse_row_view, oracle_rows, row_view
from dsl.verify.sequences import rows, sequences

BARS = {"bf16": 3e-3, "fp16": 5e-4, "fp32": 1e-5}
"""The relative error that a dtype's own rounding of P and of the output explains."""
LSE_BAR = 2e-5
_ROW_FACTOR = 3
"""How much worse than the whole a single row may be: few keys average less, and their values may cancel."""
_SCORE_ERROR = 2.0**-22
"""Relative to a score: fp32 sums and products move a score of 300 by about 1e-4, and its weight by as much."""
_FAST_TANH_ERROR = 2.0**-10
_EXACT_BYTES = 16 << 30
"""Largest number of score bytes for which every row is checked; beyond it, a sample."""
_SAMPLES = 192


@dataclass(frozen=True, slots=True)
class Expected:
    """The oracle's answer: for `rows`, `out` `[row, head, DV]` and `lse` `[row, head]`."""

    rows: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True, slots=True)
class Comparison:
    """Relative errors of the whole, of the worst row and of the log-sum-exp, with their bars, and any other fault."""

    error: float
    bar: float
    row_error: float
    row_bar: float
    lse_error: float | None
    lse_bar: float
    fault: str | None = None

    @property
    def problem(self) -> str | None:
        """Why the result does not pass; None where it does."""
        return self.fault or self._excess()

    def _excess(self) -> str | None:
        """Which errors are over their bars."""
        figures = [("the error", self.error, self.bar), ("a row's error", self.row_error, self.row_bar)]
        if self.lse_error is not None:
            figures.append(("the lse's error", self.lse_error, self.lse_bar))
        over = [f"{name} is {value:.1e}, over {bar:.1e}" for name, value, bar in figures if not value <= bar]
        return "; ".join(over) or None


def expect(spec: Spec, inputs: Inputs) -> Expected:
    """Ask the oracle: about every row of an ordinary batch, about a sample of a large one."""
    wanted = checked_rows(spec, inputs)
    return Expected(wanted, *oracle_rows(spec, inputs, wanted))


def checked_rows(spec: Spec, inputs: Inputs) -> torch.Tensor:
    """All rows, or those at the edges of sequences and of possible tiles, and some between."""
    total = rows(spec, inputs)
    parts = sequences(spec, inputs)
    if sum(8 * spec.heads * part.q_len * part.kv_len for part in parts) <= _EXACT_BYTES:
        return torch.arange(total)
    wanted = torch.randint(total, (_SAMPLES,), generator=torch.Generator().manual_seed(0)).tolist()
    for part in parts[:: max(1, len(parts) // 16)]:
        edges = (0, 1, 63, 64, 127, 128, 129, 255, 256, part.q_len // 2, part.q_len - 2, part.q_len - 1)
        wanted += [part.row_start + edge for edge in edges if 0 <= edge < part.q_len]
    return torch.tensor(sorted(set(wanted)))


def compare(
    spec: Spec,
    expected: Expected,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    fast_tanh: bool = False,
) -> Comparison:
    """Compare what a launcher returned with what the oracle expects.

    `fast_tanh` grants 16-bit specs the error of a GPU's approximate `tanh`. Rows whose true value is not finite are
    left out; a row that sees no key must be exactly 0.
    """
    every_row = row_view(spec, out, spec.out_layout)
    wanted = expected.rows.to(out.device)
    actual = every_row[wanted].double()
    is_finite = expected.out.isfinite().all(dim=-1) & (expected.lse.isfinite() | (expected.lse == -math.inf))
    is_empty = is_finite & (expected.out == 0).all(dim=-1)
    difference = torch.where(is_finite[:, :, None], actual - expected.out, 0)
    size = torch.where(is_finite[:, :, None], expected.out, 0)

    finite_lse = expected.lse[expected.lse.isfinite()].abs()
    peak = finite_lse.max().item() if finite_lse.numel() else 0.0
    is_fast = fast_tanh and spec.dtype != "fp32" and _uses_tanh(spec.score)
    tanh_allowance = peak * _FAST_TANH_ERROR if is_fast else 0.0
    bar = BARS[spec.dtype] + peak * _SCORE_ERROR + tanh_allowance

    fault = None
    if bool((actual[is_empty] != 0).any()):
        fault = "a row that sees no key is not exactly 0"
    elif bool(is_finite.all()) and not bool(every_row.isfinite().all()):
        fault = "the output is not finite everywhere"
    elif is_finite.numel() and not bool(is_finite.any()):
        fault = "no row has a finite true value, so nothing was compared"
    return Comparison(
        error=_ratio(difference.norm(), size.norm()),
        bar=bar,
        row_error=_worst(difference, size),
        row_bar=_ROW_FACTOR * bar,
        lse_error=None if lse is None else _lse_error(spec, lse, expected, is_finite),
        lse_bar=LSE_BAR + tanh_allowance,
        fault=fault,
    )


def _worst(difference: torch.Tensor, size: torch.Tensor) -> float:
    """The largest relative error of a row of one head."""
    if not difference.numel():
        return 0.0
    error = difference.norm(dim=-1)
    return _number(torch.where(error == 0, 0, error / size.norm(dim=-1)).max())


def _lse_error(spec: Spec, lse: torch.Tensor, expected: Expected, is_finite: torch.Tensor) -> float:
    """Relative to max(1, |lse|); infinite where one is -inf and the other is not."""
    if not is_finite.numel():
        return 0.0
    actual = lse_row_view(spec, lse)[expected.rows.to(lse.device)].double()
    relative = (actual - expected.lse).abs() / expected.lse.abs().clamp(min=1)
    relative = torch.where(relative.isfinite(), relative, math.inf)
    return _number(torch.where((actual == expected.lse) | ~is_finite, 0, relative).max())


def _ratio(difference: torch.Tensor, size: torch.Tensor) -> float:
    if difference == 0:
        return 0.0
    return _number(difference / size)


def _number(value: torch.Tensor) -> float:
    """A float, infinite where it is NaN, so that NaN is never below a bar."""
    number = value.item()
    return math.inf if math.isnan(number) else number


def _uses_tanh(expression: Expression) -> bool:
    return any(isinstance(node, Call) and node.function in ("tanh", "softcap") for node in _walk(expression))


def _walk(expression: Expression) -> Iterator[Expression]:
    yield expression
    for name in ("arguments", "indices"):
        for child in getattr(expression, name, ()):
            yield from _walk(child)
    for name in ("operand", "left", "right"):
        child = getattr(expression, name, None)
        if child is not None:
            yield from _walk(child)
