"""A softmax that keeps the maximum of a row's first keys: which rows it cannot do, and that `verify` tries them all."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsl.check import load_spec
from dsl.source import Source
from dsl.spec import Case, Spec
from dsl.verify import speculation
from dsl.verify.cases import Adversity, Trend, trials
from dsl.verify.compare import Expected, compare, expect
from dsl.verify.inputs import Inputs, make_inputs
from dsl.verify.sequences import sequences
from dsl.verify.speculation import failing_rows, failing_tiles
from dsl.verify.worker import verify_module
from tests.realistic import FAILING_TILES, packed_arguments, queries_and_keys

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Check = Callable[[torch.Tensor], torch.Tensor]
"""Which rows of one head are right, told from which ones are (bool `[row]`): a fault says yes too often."""


def packed(dtype: str, heads: str = "4 / 2") -> str:
    fields = f"dtype = {dtype}  heads = {heads}  head_dim = 64  lse = true"
    return f"attention attend {{ query = packed  kv = packed  {fields} }}"


def spec_of(text: str) -> Spec:
    return load_spec(Source.from_text(text, "attend.attn")).attentions[0]


# What fails.


def test_failing_rows_are_counted_as_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "_SCORE_BYTES", 4 * 4 * 300 * 7)  # seven rows at a time
    for dtype, nats in ((torch.bfloat16, 30.0), (torch.float16, 7.0)):
        q, k = queries_and_keys("normal", 300, 4, 2, 64, dtype)
        found = failing_rows(q[:50], nats * k, 64**-0.5, first_keys=32)
        score = torch.einsum("rhd,nhd->rhn", q[:50].double(), (nats * k).repeat_interleave(2, dim=1).double()) / 8
        weights = (score - score[:, :, :32].amax(dim=2, keepdim=True)).exp()
        limit = torch.finfo(dtype).max
        expected = (weights.sum(dim=2) >= 2.0**64) | (weights.amax(dim=2) > limit)
        assert torch.equal(found, expected) and 0 < found.double().mean() < 0.9


def test_no_keys_and_no_rows_fail_nowhere() -> None:
    q, k = queries_and_keys("normal", 5, 2, 1, 8, torch.bfloat16)
    assert not failing_rows(q, k[:0], 1.0).any()
    assert failing_rows(q[:0], k, 1.0).shape == (0, 2)
    assert failing_tiles(failing_rows(q[:0], k, 1.0)).shape == (0, 2)


def test_a_tile_fails_with_any_of_its_rows() -> None:
    rows = torch.zeros(130, 2, dtype=torch.bool)
    rows[63, 0] = rows[129, 1] = True
    assert failing_tiles(rows).tolist() == [[True, False], [False, False], [False, True]]


# What verify tries.

FATE = {
    Trend("ramp", 100): {"bf16": "all", "fp16": "all"},
    Trend("last", 100, every=5): {"bf16": "some", "fp16": "some"},
    Trend("first", 60): {"bf16": "none", "fp16": "none"},
    Trend("ramp", -100): {"bf16": "none", "fp16": "none"},
    Trend("zero"): {"bf16": "none", "fp16": "none"},
    Trend("level", -200): {"bf16": "none", "fp16": "none"},
    Trend("ramp", 400): {"bf16": "all", "fp16": "all"},
    Trend("ramp", 400, every=97): {"bf16": "some", "fp16": "some"},
    Trend("last", 12.5): {"bf16": "none", "fp16": "some"},
    Trend("last", 20): {"bf16": "none", "fp16": "all"},
    Trend("last", 46): {"bf16": "some", "fp16": "all"},
    Trend("last", 100): {"bf16": "all", "fp16": "all"},
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_trends_fail_in_no_row_in_some_and_in_all(dtype: str) -> None:
    spec = spec_of(packed(dtype))
    (trial,) = (trial for trial in trials(spec, (), "large") if trial.name == "trends")
    inputs = make_inputs(spec, trial.case, adversity=trial.adversity)
    found: dict[tuple[Trend, int], str] = {}
    for part in sequences(spec, inputs):
        q = inputs["q"][part.row_start : part.row_start + part.q_len]
        k = inputs["k"][part.kv_start : part.kv_start + part.kv_len]
        fails = failing_rows(q, k, float(spec.scale))
        for head in range(spec.heads):
            share = fails[:, head].double().mean().item()
            trend = trial.adversity.trend(part.index, head // spec.group)
            found[trend, head] = {0.0: "none", 1.0: "all"}.get(share, "some")
            if trend.every == 97:
                assert failing_tiles(fails)[:, head].tolist() == [True, False, True, True, False]
    assert found == {(trend, head): fates[dtype] for trend, fates in FATE.items() for head in range(spec.heads)}


@pytest.mark.parametrize("family", ["single  kv = paged(block = 16)", "packed  kv = paged(block = 16)"])
def test_scores_follow_their_trend_through_pages(family: str) -> None:
    spec = spec_of(f"attention f {{ query = {family}  dtype = fp16  heads = 4 / 2  head_dim = 32  scale = -0.5 }}")
    trends = (Trend("last", 50), Trend("ramp", -80))
    inputs = make_inputs(spec, Case((1, 1), (40, 90)), adversity=Adversity(trends=trends))
    for sequence, length in enumerate((40, 90)):
        pages = inputs["block_tables"][sequence, : -(-length // 16)].long()
        keys = inputs["k_cache"][pages].flatten(0, 1)[:length].double()
        query = inputs[spec.arguments[0]][sequence].double()
        for head in range(4):
            score = -0.5 * keys[:, head // 2] @ query[head]
            if trends[(sequence + head // 2) % 2].shape == "last":
                assert score[:-4].abs().max() < 15 and (score[-4:] - 50).abs().max() < 15
            else:
                assert (score - 80 * torch.linspace(1, 0, length)).abs().max() < 15


def test_a_single_key_has_no_trend_but_is_finite() -> None:
    spec = spec_of(packed("bf16"))
    for trend in FATE:
        inputs = make_inputs(spec, Case((3, 0, 2), (1, 1, 0)), adversity=Adversity(trends=(trend,)))
        assert inputs["q"].isfinite().all() and inputs["k"].isfinite().all()


# Kernels that would and would not do.


def attend(check: Check) -> Any:
    """A packed kernel that keeps an offset where `check` lets it, in plain PyTorch, as a module."""

    def function(q, k, v, starts_q, starts_k, *, out=None, out_lse=None):
        out = torch.empty_like(q) if out is None else out
        lse = torch.empty(q.shape[1], len(q)) if out_lse is None else out_lse
        out.zero_()
        lse.fill_(-math.inf)
        for place in range(len(starts_q) - 1):
            rows, keys = (slice(int(x[place]), int(x[place + 1])) for x in (starts_q, starts_k))
            for head in range(q.shape[1]):
                kv_head = head * k.shape[1] // q.shape[1]
                if keys.stop > keys.start:
                    result = one_head(q[rows, head], k[keys, kv_head], v[keys, kv_head], check)
                    out[rows, head], lse[head, rows] = result[0].to(q.dtype), result[1]
        return out, lse

    def reference(*arguments: Any, **keywords: Any) -> Any:
        return attend(lambda holds: holds).attend(*arguments, **keywords)

    function.reference = reference  # type: ignore[attr-defined]
    return SimpleNamespace(attend=function)


def one_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, check: Check) -> tuple[torch.Tensor, torch.Tensor]:
    score = q.float() @ k.float().T * (q.shape[1] ** -0.5 * math.log2(math.e))
    kept, total, offset = weighted(score, v, score[:, :128].amax(dim=1))
    safe, safe_total, maximum = weighted(score, v, score.amax(dim=1))
    keeps = check((total < 2.0**64) & kept.isfinite().all(dim=1))
    lse = torch.where(keeps, offset + total.log2(), maximum + safe_total.log2()) * math.log(2)
    return torch.where(keeps[:, None], kept, safe), lse


def weighted(
    score: torch.Tensor, v: torch.Tensor, offset: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights = (score - offset[:, None]).exp2()
    total = weights.sum(dim=1)
    return weights.to(v.dtype).float() @ v.float() / total[:, None], total, offset


CHECKS: dict[str, Check] = {
    "never redone": torch.ones_like,
    "redone by the first row alone": lambda holds: holds[:1].expand_as(holds),
    "redone by the last row alone": lambda holds: holds[-1:].expand_as(holds),
    "redone but for every 64th row": lambda holds: holds | (torch.arange(len(holds)) % 64 == 33),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_that_checks_passes(dtype: str) -> None:
    file = load_spec(Source.from_text(packed(dtype), "attend.attn"))
    rows = list(verify_module(attend(lambda holds: holds), file, "cpu"))
    assert {row.case for row in rows} == {"workload 0", "lengths", "logits", "trends"}
    assert all(row.passed for row in rows), [row for row in rows if not row.passed]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_that_checks_passes_large_trends(dtype: str) -> None:
    problems = list(problems_of(dtype, lambda holds: holds))
    assert len(problems) == 4 and not any(problems), problems


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", CHECKS)
def test_a_kernel_that_does_not_check_is_found(dtype: str, fault: str) -> None:
    assert next(problems_of(dtype, CHECKS[fault])) is not None


def problems_of(dtype: str, check: Check) -> Iterator[str | None]:
    """What is wrong with a kernel on each batch of trends that a GPU gets."""
    for spec, inputs, expected in batches_of_trends(dtype):
        yield compare(spec, expected, *attend(check).attend(*inputs.positional)).problem


@functools.cache
def batches_of_trends(dtype: str) -> list[tuple[Spec, Inputs, Expected]]:
    spec = spec_of(packed(dtype, heads="1"))
    adverse = [trial for trial in trials(spec, (), "large") if trial.adversity.trends]
    batches = [make_inputs(spec, trial.case, adversity=trial.adversity) for trial in adverse]
    return [(spec, inputs, expect(spec, inputs)) for inputs in batches]


# How often.


@pytest.mark.parametrize("kind", FAILING_TILES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_how_many_tiles_of_realistic_inputs_fail(kind: str, dtype: str) -> None:
    q, k = queries_and_keys(kind, 2048, 4, 4, 72, DTYPES[dtype])
    share = failing_tiles(failing_rows(q, k, 72**-0.5)).double().mean().item()
    low, high = FAILING_TILES[kind][dtype]
    assert low <= share <= high, share


@pytest.mark.parametrize("kind", FAILING_TILES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_that_checks_passes_realistic_inputs(kind: str, dtype: str) -> None:
    spec = spec_of(packed(dtype))
    arguments = packed_arguments(kind, 700, 4, 2, 64, DTYPES[dtype])
    out, lse = attend(lambda holds: holds).attend(*arguments.values())
    found = compare(spec, expect(spec, arguments), out, lse)  # type: ignore[arg-type]
    assert found.problem is None
    assert found.error < 0.85 * found.bar and found.row_error < 0.75 * found.row_bar, found
