"""No text makes the front end crash: it finds something wrong, or nothing, and says so soon."""

from __future__ import annotations

import random
import time

import pytest

from dsl.check import load_spec
from dsl.diagnostics import CATALOGUE, SpecError, render
from dsl.fmt import format_source
from dsl.source import Source
from dsl.syntax import parse
from tests.conftest import SPECS
from tests.strategies import mutated, noise

LAYER = """
attention layer {
    query    = packed(max = 8)
    kv       = paged(block = 64)
    dtype    = bf16
    kv_dtype = fp8_e4m3 per [block, slot, kv_head]
    heads    = 64 / 8
    head_dim = 192 / 128
    param sinks[head] : fp32
    param window : int32
    k_cache  = [block, kv_head, dim/8, slot, dim%8]
    v_cache  = [block, kv_head, slot/8, dim, slot%8]
    mask     = causal and 0 <= q - kv < window or not (kv == 0)
    score    = softcap(score, 30) + alibi(h) * (kv - q) - where(q % 2 == 1, 1.5, -2 // 3)
    sink     = sinks[h]
    scale    = 1 / sqrt(192)
    lse      = true
    split    = fixed(256)
    softmax  = online
    targets  = [portable, hopper]
}
attention other from layer { heads = 32 / 8 }
dispatch both = [layer, other]
workload layer { seqs = [2, 3]  q_len = [1, [1, 2, 3]]  kv_len = 4 }
"""


def _answer(text: str) -> None:
    """Every finding has a code of the catalogue and can be printed; a text without one can be formatted."""
    source = Source.from_text(text)
    try:
        load_spec(source)
    except SpecError as error:
        assert error.diagnostics
        assert {finding.code for finding in error.diagnostics} <= set(CATALOGUE)
        for form in ("human", "short", "json", "github"):
            assert render(source, error.diagnostics, form)
    if not parse(source).diagnostics:
        formatted = format_source(source)
        assert format_source(Source.from_text(formatted)) == formatted
        assert parse(Source.from_text(formatted)) == parse(source)


@pytest.mark.parametrize("seed", range(20))
def test_mutations_and_noise(seed: int) -> None:
    chance = random.Random(seed)
    decode = next(path for path in SPECS if path.stem == "decode").read_text("utf-8")
    for _ in range(100):
        start = time.perf_counter()
        text = noise(chance) if chance.random() < 0.2 else mutated(chance.choice((LAYER, LAYER, decode)), chance)
        _answer(text)
        assert time.perf_counter() - start < 5, text


HEAD = "attention a { query = packed kv = packed dtype = bf16 heads = 4 head_dim = 64 "
LARGE = {
    "900 brackets": HEAD + "mask = " + "q + (" * 900 + "q" + ")" * 900 + " > 0 }",
    "900 signs": HEAD + "score = " + "- " * 900 + "score }",
    "200 terms": HEAD + "score = " + "score + " * 199 + "score }",
    "5000 terms": HEAD + "score = " + "score + " * 5000 + "score }",
    "doubling chains": HEAD + "score = " + "where(0 < " * 40 + "q" + " < 3, 1, 2)" * 40 + " }",
    "1 MB of terms": HEAD + "score = " + "q+" * 500_000 + "q }",
    "1 MB of a name": HEAD + "score = " + "q" * 1_000_000 + " }",
    "1 MB of a number": HEAD + "score = " + "1" * 1_000_000 + " }",
    "1 MB of brackets": "(" * 1_000_000,
    "1 MB of comment": HEAD + "}#" + "x" * 1_000_000,
    "1 MB of dollars": "$" * 1_000_000,
    "many errors": HEAD + "x = " * 9_000 + "}",
    "many heads": "attention " * 19_000,
    "many sequences": HEAD + "} workload a { q_len = 1 seqs = 2147483647 }",
}


@pytest.mark.parametrize("name", LARGE)
def test_large_texts_are_answered_soon(name: str) -> None:
    source = Source.from_text(LARGE[name])
    parse(Source.from_text(HEAD + "}"))
    start = time.process_time()
    try:
        load_spec(source)
    except SpecError as error:
        assert error.diagnostics
    assert time.process_time() - start < 3


@pytest.mark.parametrize("terms", [150, 199])
def test_a_long_flat_sum_is_fine(terms: int) -> None:
    load_spec(Source.from_text(HEAD + "score = " + "score + " * terms + "score }"))


def test_an_inherited_expression_is_typed_once():
    wide = " + ".join([f"max({', '.join(['q'] * 190)})"] * 18)
    base = f"attention a {{ query = packed kv = packed dtype = bf16 heads = 1 head_dim = 64 mask = {wide} > 3 }}\n"
    text = base + "".join(f"attention a{number} from a {{}}\n" for number in range(1500))
    start = time.process_time()
    assert len(load_spec(Source.from_text(text)).attentions) == 1501
    assert time.process_time() - start < 3
