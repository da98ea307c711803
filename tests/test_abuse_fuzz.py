"""Texts without number: mutations of a corpus that reaches the whole front end, and random specs that are valid."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsl.pipeline import generate
from dsl.source import Source
from tests.fuzz import STAGES, Count, Tracer, answer, corpus, fuzz, is_stage, lines_of, quietly, seeds
from tests.strategies import buildable_specs

ROUNDS = 20
EACH = 1000
REACHED = 0.95
"""Of the lines of these stages, by the corpus; what else there is, the tests of each stage reach."""


def _nothing_wrong(seen: Count, texts: int) -> None:
    print(seen)
    assert seen.texts == texts == seen.refused + seen.built + len(seen.faults)
    assert not seen.faults, "\n".join(f"{data!r}\n{trouble}" for data, trouble in seen.faults[:3])
    assert seen.refused > texts / 3 and seen.built


@pytest.mark.parametrize("seed", range(4))
def test_a_few_mutations(seed: int) -> None:
    _nothing_wrong(fuzz(200, seed), 200)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 100 + ROUNDS))
def test_twenty_thousand_mutations(seed: int) -> None:
    assert ROUNDS * EACH == 20_000
    _nothing_wrong(fuzz(EACH, seed), EACH)


def test_the_corpus_is_answered() -> None:
    seen = Count()
    for data in corpus().values():
        answer(data, seen)
    assert seen.texts > 50 and seen.built and len(seen.codes) > 40


def test_the_corpus_reaches_the_front_end() -> None:
    """Else a mutation of it would not either."""
    tracer = Tracer()
    for data in set(seeds()):
        tracer.run(quietly(data))
    reached: dict[str, set[int]] = {}
    for code, _, line in tracer.edges:
        reached.setdefault(code.co_filename, set()).add(line)
    files = [path for path in sorted(Path(generate.__code__.co_filename).parent.rglob("*.py")) if is_stage(str(path))]
    assert len(files) > 2 * len(STAGES)
    missed = {path.name: sorted(set(lines_of(path)) - reached.get(str(path), set())) for path in files}
    total = sum(len(set(lines_of(path))) for path in files)
    share = 1 - sum(map(len, missed.values())) / total
    print(f"the corpus reaches {share:.1%} of {total} lines")
    assert share > REACHED, missed


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(buildable_specs())
def test_a_valid_spec_builds(text: str) -> None:
    module = generate(Source.from_text(text, "random.attn"))
    compile(module, "random.py", "exec", dont_inherit=True)
    assert module == generate(Source.from_text(text, "random.attn"))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="not run: no torch here")
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(buildable_specs(small=True))
def test_a_valid_spec_verifies(text: str) -> None:
    from dsl.verify.runner import verify_files

    report = verify_files([Source.from_text(text, "random.attn")], device="cpu")
    assert report.rows and report.passed, (text, report.failures)


@given(st.binary(max_size=400))
@settings(max_examples=200, deadline=None)
def test_any_bytes(data: bytes) -> None:
    answer(data, Count())


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_text(text: str) -> None:
    answer(text.encode("utf-8", "surrogatepass"), Count())
