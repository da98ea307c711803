"""The formatter and the printer: what they print means what they were given."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, reject, settings

from dsl.check import load_spec
from dsl.diagnostics import SpecError
from dsl.fmt import format_source, print_spec
from dsl.source import Source
from dsl.spec import SpecFile
from dsl.syntax import parse
from tests.conftest import SPECS
from tests.strategies import spec_texts

UGLY = """

# head


# second
attention   a{  # opened
query=single   # one
kv = paged( block=16 )

  dtype=bf16 heads=-32/4 # two

  # own
  head_dim
    = 128 k_cache=[block,kv_head , dim / 8,slot,dim % 8]
  mask = causal and
     q - kv<-3 or(not q==- 3 and kv>3
     and kv < 2)
  sink = sinks [ h ] param sinks [head]:fp32
  # last

} attention long_name from a { } attention c from a { heads = 3 dtype=fp16 } # e
dispatch d=[a , long_name,
c,]


workload a{ kv_len=[1,[2,3]
# in
,4] }
# end

"""

PRETTY = """\
# head

# second
attention a {  # opened
    query    = single  # one
    kv       = paged(block = 16)

    dtype    = bf16  heads = -32 / 4  # two

    # own
    head_dim = 128  k_cache = [block, kv_head, dim/8, slot, dim%8]
    mask     = causal and
        q - kv < -3 or (not q == -3 and kv > 3
            and kv < 2)
    sink     = sinks[h]  param sinks[head] : fp32
    # last
}
attention long_name from a {}
attention c         from a { heads = 3  dtype = fp16 }  # e
dispatch d = [a, long_name,
    c,]

workload a {
    kv_len = [1, [2, 3]
        # in
        , 4]
}
# end
"""


def _same(one: SpecFile, other: SpecFile) -> bool:
    return (one.attentions, one.dispatches, one.workloads) == (other.attentions, other.dispatches, other.workloads)


def test_pretty() -> None:
    assert format_source(Source.from_text(UGLY)) == PRETTY


def test_pretty_stays() -> None:
    assert format_source(Source.from_text(PRETTY)) == PRETTY


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_specs_are_formatted(path: Path) -> None:
    source = Source.read(path)
    assert format_source(source) == source.text


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_specs_survive_the_printer(path: Path) -> None:
    spec_file = load_spec(Source.read(path))
    assert _same(load_spec(Source.from_text(print_spec(spec_file))), spec_file)


def test_syntax_errors_are_raised() -> None:
    with pytest.raises(SpecError):
        format_source(Source.from_text("attention a { heads = }"))


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment", "#\n\n\n#"])
def test_no_tokens(text: str) -> None:
    once = format_source(Source.from_text(text))
    assert format_source(Source.from_text(once)) == once


@settings(max_examples=150, deadline=None, derandomize=True)
@given(spec_texts())
def test_round_trips(text: str) -> None:
    source = Source.from_text(text)
    formatted = format_source(source)
    assert format_source(Source.from_text(formatted)) == formatted
    assert parse(Source.from_text(formatted)) == parse(source)
    try:
        spec_file = load_spec(source)
    except SpecError as error:
        assert {finding.code for finding in error.diagnostics} <= {"ATTN408"}, str(error)
        reject()
    printed = print_spec(spec_file)
    assert _same(load_spec(Source.from_text(printed)), spec_file), printed
