"""The parser: tokens, items, trees, and what is left of a text that is wrong."""

from __future__ import annotations

import threading

import pytest

from dsl import nodes
from dsl.source import Source
from dsl.syntax import parse

BLOCK = "attention a {{ {} }}"


def _parse(text: str) -> nodes.File:
    return parse(Source.from_text(text))


def _attention(file: nodes.File) -> nodes.Attention:
    block = file.blocks[0]
    assert isinstance(block, nodes.Attention)
    return block


def _value(expression: str) -> nodes.Value:
    file = _parse(BLOCK.format(f"mask = {expression}"))
    assert not file.diagnostics, file.diagnostics
    return _attention(file).fields[0].value


def _shape(value: nodes.Value) -> object:
    """The tree as nested tuples."""
    if isinstance(value, nodes.Binary):
        return (value.operator.text, _shape(value.left), _shape(value.right))
    if isinstance(value, nodes.Unary):
        return (value.operator.text, _shape(value.operand))
    if isinstance(value, nodes.Chain):
        return tuple(_shape(operand) for operand in value.operands), tuple(sign.text for sign in value.operators)
    if isinstance(value, nodes.Number):
        return value.value
    assert isinstance(value, nodes.Name)
    return value.text


def _findings(text: str) -> list[tuple[str, int, int]]:
    file = _parse(text)
    return [(finding.code, *file.source.position(finding.span.start)) for finding in file.diagnostics]


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("a + b * c", ("+", "a", ("*", "b", "c"))),
        ("a - b - c", ("-", ("-", "a", "b"), "c")),
        ("a // b % c", ("%", ("//", "a", "b"), "c")),
        ("-a * b", ("*", ("-", "a"), "b")),
        ("(a + b) * c", ("*", ("+", "a", "b"), "c")),
        ("not a == b and c or d", ("or", ("and", ("not", (("a", "b"), ("==",))), "c"), "d")),
        ("0 <= q - kv < 128", ((0, ("-", "q", "kv"), 128), ("<=", "<"))),
        ("8-1", ("-", 8, 1)),
        ("q-3", ("-", "q", 3)),
        ("q - 3", ("-", "q", 3)),
        ("q -3", ("-", "q", 3)),
        ("- -q", ("-", ("-", "q"))),
        ("1e-3 + 2.5", ("+", 1e-3, 2.5)),
    ],
)
def test_precedence(text: str, shape: object) -> None:
    assert _shape(_value(text)) == shape


@pytest.mark.parametrize("word", ["paramx", "xparam", "andy", "fromage", "per_head", "nothing", "workloads", "orb"])
def test_keywords_are_whole_words(word: str) -> None:
    assert _value(word) == nodes.Name(word)


def test_a_glued_keyword_is_no_keyword() -> None:
    assert _value("xandy") == nodes.Name("xandy")


def test_spans_tell_where_it_was_written() -> None:
    file = _parse("attention a {\n  heads = (32 / 4)\n}")
    field = _attention(file).fields[0]
    assert file.source.text[field.span.start : field.span.end] == "heads = (32 / 4)"
    assert file.source.text[field.value.span.start : field.value.span.end] == "(32 / 4)"


def test_spacing_and_comments_do_not_count() -> None:
    one = _parse("attention a{heads=32/4 mask=0<q}# c")
    other = _parse("\n# c\nattention a\n{ heads\n=\n32\n/ 4   mask = 0 <\n q\n}\n")
    assert one == other


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", ["", "\n"])
def test_line_ends_do_not_count(ends: str, last: str) -> None:
    lines = ["attention a {", "    heads = 32 # c", "    head_dim = @", "}"]
    text = ends.join(lines) + last
    assert _findings(text) == [("ATTN102", 3, 16)]
    assert _parse(text) == _parse("\n".join(lines))


def test_a_mixed_file_has_the_same_lines() -> None:
    assert _findings("attention a {\r\n\n heads = @\n}") == [("ATTN102", 3, 10)]


def test_a_byte_order_mark_does_not_count() -> None:
    source = Source.from_bytes("a.attn", b"\xef\xbb\xbfattention a {}")
    assert parse(source).blocks == (nodes.Attention(nodes.Name("a"), None, (), ()),)


@pytest.mark.parametrize(
    ("text", "findings"),
    [
        ("attention a { heads:8kv_heads:2 }", [("ATTN104", 1, 20)]),
        ("attention a { heads: 8 dtype = bf16 }", [("ATTN104", 1, 20)]),
        ("attention a { heads = 8kv_heads = 2 }", [("ATTN103", 1, 23)]),
        ("attention a { heads:", [("ATTN104", 1, 20), ("ATTN106", 1, 21)]),
        ("attention a { heads =", [("ATTN105", 1, 22), ("ATTN106", 1, 22)]),
        ("attention a { q = [block, slot", [("ATTN105", 1, 31), ("ATTN106", 1, 31)]),
        ("attention", [("ATTN105", 1, 10)]),
        ("attention a {\n mask = causal and\n score = 3\n}", [("ATTN105", 2, 19)]),
        ("attention a { mask = q = 3 }", [("ATTN105", 1, 21)]),
        ("attention a { mask >= 3 }", [("ATTN104", 1, 20)]),
        ("attention a { heads = >= 3 }", [("ATTN104", 1, 23)]),
        ("attention a { mask = (a }\nattention b { heads = 1 1 }", [("ATTN105", 1, 24), ("ATTN104", 2, 25)]),
        ("attention a { heads = 8 attention b { }", [("ATTN106", 1, 25)]),
        ("dispatch d [a]\nworkload w { seqs = }", [("ATTN104", 1, 12), ("ATTN105", 2, 20)]),
        ("{ }", [("ATTN107", 1, 1)]),
        ("heads = 3 head_dim = 4", [("ATTN107", 1, 1)]),
        ("attention a { x = 99999999999 y = 1e99 z = 2147483647 }", [("ATTN109", 1, 19), ("ATTN109", 1, 35)]),
        ("attention a { x = " + "9" * 5000 + " }", [("ATTN109", 1, 19)]),
        ("attention a { x = ((((1)) }", [("ATTN105", 1, 26)]),
        ("attention a { x = f(a b) }", [("ATTN104", 1, 23)]),
        ("attention a { x = 1) y = 2 }", [("ATTN104", 1, 20)]),
    ],
)
def test_findings(text: str, findings: list[tuple[str, int, int]]) -> None:
    assert _findings(text) == findings


def test_messages_show_no_names_of_tokens() -> None:
    texts = [
        "heads",
        "heads 3",
        "heads : 3",
        "= 3",
        "x = (",
        "x = [1",
        "x = [1 2",
        "x = f(",
        "x = f(a = ",
        "x = 1 per [a]",
        "param",
        "param x",
        "param x :",
        "param x [a",
        "x = a per",
        "x = not",
        "x = 1 < ",
        "x = 1 2",
        "x = a[",
    ]
    for text in texts:
        for finding in _parse(BLOCK.format(text)).diagnostics:
            words = finding.message.replace("`", " ").replace(",", " ").split()
            assert not [word for word in words if word.isupper() and len(word) > 1], finding.message
            assert "_" not in finding.message


@pytest.mark.parametrize("deep", [100, 101])
def test_nesting(deep: int) -> None:
    for text in (
        "(" * deep + "q" + ")" * deep,
        "- " * deep + "q",
        "-(" * (deep // 2) + "- " * (deep % 2) + "q" + ")" * (deep // 2),
    ):
        codes = [code for code, _, _ in _findings(BLOCK.format(f"mask = {text}"))]
        assert codes == ([] if deep == 100 else ["ATTN108"])


def test_a_broken_item_leaves_its_neighbours_alone() -> None:
    file = _parse("attention a { heads = 3 3 dtype = bf16 param x : int32 param y : head_dim = 4 }")
    block = _attention(file)
    assert [field.name.text for field in block.fields] == ["dtype", "head_dim"]
    assert [param.name.text for param in block.params] == ["x"]
    assert {"heads", "y"} <= block.broken


def test_threads_get_the_same_trees() -> None:
    text = "attention a { mask = causal and q - kv < 128 heads = 3 3 }"
    expected = _parse(text)
    found = []

    def work() -> None:
        found.extend(_parse(text) for _ in range(12))

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16 * 12
    assert all(file == expected and file.diagnostics == expected.diagnostics for file in found)
