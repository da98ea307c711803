"""What a checked spec says: defaults, inheritance, layouts, types and constants; and the four forms of a finding."""

from __future__ import annotations

import ast
import json
import math
import sys

import pytest

from dsl.check import load_spec
from dsl.check.fields import FIELDS
from dsl.check.names import MODULE_NAMES
from dsl.diagnostics import Form, SpecError, not_utf8, render
from dsl.expr.scope import BUILT_INS, FUNCTIONS
from dsl.expr.tree import Binary, Call, Constant, Expression, Index, Name, Unary
from dsl.source import Source
from dsl.spec import Axis, Case, Param, Spec, SpecFile, Split
from tests.conftest import ROOT, SPECS, run_python

KINDS = {
    "decode": ("single", "paged(block = 16)"),
    "prefill": ("packed", "packed"),
    "paged": ("packed", "paged(block = 16)"),
    "dense": ("batched", "batched"),
}


def block(family: str = "prefill", *fields: str, name: str = "layer") -> str:
    query, kv = KINDS[family]
    lines = [f"query = {query}", f"kv = {kv}", "dtype = bf16", "heads = 8 / 2", "head_dim = 64"]
    own = {line.split(" =")[0] for line in fields}
    return (
        f"attention {name} {{ {' '.join([*(line for line in lines if line.split(' =')[0] not in own), *fields])} }}\n"
    )


def load(text: str) -> SpecFile:
    return load_spec(Source.from_text(text, "layer.attn"))


def spec(family: str = "prefill", *fields: str) -> Spec:
    return load(block(family, *fields)).attentions[0]


def refusal(text: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        load(text)
    return caught.value


def codes(text: str) -> list[str]:
    return [finding.code for finding in refusal(text).diagnostics]


def axes(*names: str) -> tuple[Axis, ...]:
    return tuple(Axis(name) for name in names)


def typed(field: str, text: str) -> Expression:
    return getattr(spec("prefill", f"{field} = {text}", *PARAMS), field)


PARAMS = ("param slopes[head] : fp32", "param n : int32", "param wide : int64", "param on : bool", "param x : bf16")


def test_defaults() -> None:
    found = spec("prefill", "head_dim = 72 / 64")
    assert (found.kv_dtype, found.kv_scale_axes, found.block, found.query_max) == ("bf16", None, None, None)
    assert found.scale == 1 / math.sqrt(72)
    assert (found.mask, found.score, found.sink) == (Constant(True, "bool"), Name("score", "float"), None)
    assert (found.lse, found.split, found.softmax, found.targets) == (False, Split(), "auto", None)
    assert not found.has_mask and not found.has_score


@pytest.mark.parametrize(
    ("family", "q", "k"),
    [
        ("decode", ("seq", "head", "dim"), ("block", "slot", "kv_head", "dim")),
        ("prefill", ("q_token", "head", "dim"), ("kv_token", "kv_head", "dim")),
        ("paged", ("q_token", "head", "dim"), ("block", "slot", "kv_head", "dim")),
        ("dense", ("seq", "head", "q_token", "dim"), ("seq", "kv_head", "kv_token", "dim")),
    ],
)
def test_default_layouts(family: str, q: tuple[str, ...], k: tuple[str, ...]) -> None:
    found = spec(family)
    assert found.family == family
    assert (found.q_layout, found.out_layout) == (axes(*q), axes(*q))
    assert (found.k_layout, found.v_layout) == (axes(*k), axes(*k))


def test_a_split_layout() -> None:
    found = spec("decode", "k_cache = [block, kv_head, dim/8, slot, dim%8]")
    assert found.k_layout == (*axes("block", "kv_head"), Axis("dim", "outer", 8), Axis("slot"), Axis("dim", "inner", 8))
    assert [str(axis) for axis in found.k_layout] == ["block", "kv_head", "dim/8", "slot", "dim%8"]


def test_one_kv_head_needs_no_axis() -> None:
    assert spec("decode", "heads = 8 / 1", "k_cache = [block, slot, dim]").k_layout == axes("block", "slot", "dim")
    assert codes(block("decode", "k_cache = [block, slot, dim]")) == ["ATTN307"]
    assert codes(block("prefill", "heads = 8 / 1", "k = [kv_token, dim]")) == ["ATTN307"]


def test_v_inside_k() -> None:
    found = spec("decode", "head_dim = 576 / 512", "v_cache = k_cache", "k_cache = [block, kv_head, slot, dim]")
    assert found.shared_kv and found.v_layout == found.k_layout
    assert found.arguments == ("query", "k_cache", "block_tables", "seq_lens")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("bf16", ("bf16", None)),
        ("int8", ("int8", ())),
        ("fp8_e5m2 per [kv_head]", ("fp8_e5m2", ("kv_head",))),
        ("fp8_e4m3 per [block, slot, kv_head]", ("fp8_e4m3", ("block", "slot", "kv_head"))),
    ],
)
def test_kv_dtype(written: str, expected: tuple[str, object]) -> None:
    found = spec("decode", f"kv_dtype = {written}")
    assert (found.kv_dtype, found.kv_scale_axes) == expected


def test_options() -> None:
    found = spec("paged", "query = packed(max = 8)", "split = fixed(128)", "softmax = online", "targets = [hopper]")
    assert (found.query_max, found.block, found.split) == (8, 16, Split("fixed", 128))
    assert (found.softmax, found.targets) == ("online", ("hopper",))


@pytest.mark.parametrize(("text", "scale"), [("0.5", 0.5), ("1 / sqrt(64)", 0.125), ("-2", -2.0), ("n", "n")])
def test_scale(text: str, scale: float | str) -> None:
    found = typed("scale", text)
    assert found == scale and type(found) is type(scale)


def test_from() -> None:
    file = load(
        block("decode", "param slopes[head] : fp32", "param n : int32", "lse = true")
        + "attention wide from layer { head_dim = 256  param slopes : fp16  param m : int32 }\n"
        + "attention wider from wide { lse = false  head_dim = 512 }\n"
    )
    wide, wider = file.attention("wide"), file.attention("wider")
    assert wide.params == (Param("slopes", "fp16", None), Param("n", "int32", None), Param("m", "int32", None))
    assert wide.lse and not wider.lse and wider.params == wide.params
    assert (wide.scale, wider.scale) == (1 / 16, 1 / math.sqrt(512))
    name = Source.from_text(file.source.text).text.index("wide ")
    assert wide.spans["heads"] == wide.spans["name"] == wide.spans["sink"]
    assert wide.spans["name"].start == name
    assert wide.spans["head_dim"] != wide.spans["name"]


def test_a_base_that_failed_raises_nothing_more() -> None:
    text = block("decode", "heads = 3 3", "window = 3") + "attention other from layer { lse = true }\n"
    assert codes(text) == ["ATTN104", "ATTN203"]
    assert codes("attention a from b from { }" + block() + "attention c from a {}\n") == ["ATTN104"]


def test_inherited_errors_point_at_the_derived_block() -> None:
    error = refusal(
        block("decode", "k_cache = [block, kv_head, dim/16, slot, dim%16]") + "attention b from layer { head_dim = 72 }"
    )
    (finding,) = error.diagnostics
    assert error.source.text[finding.span.start : finding.span.end] == "b"
    ((place, note),) = finding.related
    assert error.source.text[place.start : place.end] == "dim%16" and note == "inherited from here"


def test_dispatch() -> None:
    text = block() + "attention wide from layer { head_dim = 128 }\ndispatch both = [wide, layer]\n"
    assert load(text).dispatches[0].blocks == ("wide", "layer")


@pytest.mark.parametrize(
    "difference", ["lse = true", "param z : int32", "q = [head, q_token, dim]", "kv_dtype = int8", "kv = packed"]
)
def test_dispatch_refuses_other_calls(difference: str) -> None:
    text = block("paged", "v_cache = [block, slot, kv_head, dim]")
    text += f"attention other from layer {{ dtype = fp16 {difference} }}\ndispatch both = [layer, other]\n"
    assert set(codes(text)) <= {"ATTN211", "ATTN306"}


def cases(fields: str, family: str = "paged") -> tuple[Case, ...]:
    return load(block(family) + f"workload layer {{ {fields} }}").workloads[0].cases


def test_workloads() -> None:
    assert cases("q_len = 3") == (Case((3,), (3,)),)
    assert cases("seqs = 2 q_len = [1, 2] kv_len = 9") == (Case((1, 1), (9, 9)), Case((2, 2), (9, 9)))
    assert cases("q_len = [[1, 2, 3], 4]") == (Case((1, 2, 3), (1, 2, 3)), Case((4,), (4,)))
    assert cases("q_len = [2, [1, 2]] kv_len = [[5, 6], 7]") == (Case((2, 2), (5, 6)), Case((1, 2), (7, 7)))
    assert cases("seqs = [1, 2] kv_len = [0, [8, 9]]", "decode") == (Case((1,), (0,)), Case((1, 1), (8, 9)))
    assert cases("q_len = 4 kv_len = [[5, 6]]", "dense") == (Case((4, 4), (5, 6)),)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("paged", "q_len = []"),
        ("paged", "q_len = [[]]"),
        ("paged", "q_len = [1, 2] kv_len = [1, 2, 3]"),
        ("paged", "seqs = 2 q_len = [[1, 2, 3]]"),
        ("paged", "q_len = [[1, 2]] kv_len = [[1, 2, 3]]"),
        ("paged", "seqs = [[1]] q_len = 3"),
        ("paged", "seqs = 0 q_len = 3"),
        ("paged", "q_len = 1.5"),
        ("paged", "q_len = 2 * 3"),
        ("paged", "seqs = 2147483647 q_len = 1"),
        ("decode", "q_len = 2 kv_len = 3"),
        ("dense", "q_len = [[1, 2]]"),
    ],
)
def test_workloads_that_make_no_sense(family: str, fields: str) -> None:
    assert set(codes(block(family) + f"workload layer {{ {fields} }}")) == {"ATTN314"}


Q, KV, H = Name("q", "int32"), Name("kv", "int32"), Name("h", "int32")
CAUSAL = Binary("<=", KV, Q, "bool")


@pytest.mark.parametrize(
    ("field", "text", "tree"),
    [
        ("mask", "causal", CAUSAL),
        ("mask", "0 <= q < 3", Binary("and", Binary("<=", Constant(0, "int32"), Q, "bool"),
                                     Binary("<", Q, Constant(3, "int32"), "bool"), "bool")),
        ("mask", "not on", Unary("not", Name("on", "bool"), "bool")),
        ("mask", "head == h", Binary("==", H, H, "bool")),
        ("mask", "b < seq", Binary("<", Name("b", "int32"), Name("b", "int32"), "bool")),
        ("score", "wide + q", Binary("+", Name("wide", "int64"), Q, "int64")),
        ("score", "score + slopes[h]", Binary("+", Name("score", "float"), Index("slopes", (H,), "float"), "float")),
        ("score", "softcap(score, 30)", Call("softcap", (Name("score", "float"), Constant(30, "int32")), "float")),
        ("score", "q / kv", Binary("/", Q, KV, "float")),
        ("score", "min(q, kv, n)", Call("min", (Q, KV, Name("n", "int32")), "int32")),
        ("score", "max(q, x)", Call("max", (Q, Name("x", "float")), "float")),
        ("score", "where(causal, q, 2.0)", Call("where", (CAUSAL, Q, Constant(2.0, "float")), "float")),
        ("score", "3", Constant(3.0, "float")),
        ("sink", "0", Constant(0.0, "float")),
    ],
)  # fmt: skip
def test_types(field: str, text: str, tree: Expression) -> None:
    assert typed(field, text) == tree


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-8 // 3", -3),
        ("-8 % 3", 1),
        ("8 // -3", -3),
        ("8 % -3", -1),
        ("1 + 2 * 3 - 4", 3),
        ("7 / 2", 3.5),
        ("-2147483647 - 1", -2147483648),
        ("abs(-3)", 3),
        ("min(1, 2.5)", 1.0),
        ("where(1 < 2, 3, 4.0)", 3.0),
        ("softcap(0, 30)", 0.0),
        ("exp(0) + log(1) + tanh(0) + sqrt(4)", 3.0),
    ],
)
def test_constants_are_folded(text: str, value: float) -> None:
    tree = typed("score", f"score + ({text})")
    assert isinstance(tree, Binary) and isinstance(tree.right, Constant)
    assert tree.right.value == value and type(tree.right.value) is type(value)


@pytest.mark.parametrize(
    ("text", "sign"),
    [
        ("2147483647 + 1", "+"),
        ("-2147483647 - 2", "- 2"),
        ("65536 * 65536", "*"),
        ("1 // 0", "//"),
        ("1 % 0", "%"),
        ("q / 0", "/"),
        ("1 / 0.0", "/"),
        ("abs(-2147483647 - 1)", "abs"),
        ("exp(1000)", "exp"),
        ("log(0)", "log"),
        ("sqrt(-1)", "sqrt"),
        ("3e38 * 10", "*"),
    ],
)
def test_constants_without_a_value(text: str, sign: str) -> None:
    error = refusal(block("prefill", f"score = score + ({text})"))
    (finding,) = error.diagnostics
    assert finding.code == "ATTN408"
    assert error.source.text[finding.span.start :].startswith(sign)


def test_all_errors_come_in_the_order_of_the_text() -> None:
    error = refusal(block("prefill", "heads = 3 / 2", "mask = kvv", "score = 3 3", "window = 1", "lse = 3"))
    assert [finding.code for finding in error.diagnostics] == ["ATTN303", "ATTN401", "ATTN104", "ATTN203", "ATTN301"]


def test_no_follow_up_errors() -> None:
    assert codes(block("prefill", "query = packd", "k_cache = [block]")) == ["ATTN302"]
    assert codes(block("prefill", "param slopes[haed] : fp32", "score = score + slopes[h]")) == ["ATTN313"]
    assert codes("attention a { query = } dispatch d = [a] workload a { q_len = } " + block()) == [
        "ATTN205",
        "ATTN105",
        "ATTN105",
    ]


def _texts(source: Source, form: Form) -> str:
    with pytest.raises(SpecError) as caught:
        load_spec(source)
    return render(source, caught.value.diagnostics, form)


BAD = Source.from_text("attention a {\n  heads = 3 / 2\n}\nattention a {}\n", "dir,1/bad:.attn")


def test_short_form() -> None:
    assert _texts(BAD, "short").splitlines()[1] == (
        "dir,1/bad:.attn:2:11: error[ATTN303]: 3 query heads cannot share 2 KV heads evenly"
    )


def test_json_form() -> None:
    found = json.loads(_texts(BAD, "json"))
    assert found["schema"] == "attnspec.diagnostics/1"
    second = found["diagnostics"][1]
    assert (second["code"], second["file"], second["line"], second["column"]) == ("ATTN303", "dir,1/bad:.attn", 2, 11)
    assert (second["end_line"], second["end_column"], second["severity"]) == (2, 16, "error")
    assert [place["line"] for place in found["diagnostics"][-1]["related"]] == [1]


def test_github_form() -> None:
    assert _texts(BAD, "github").splitlines()[1] == (
        "::error file=dir%2C1/bad%3A.attn,line=2,endLine=2,col=11,endColumn=16,title=ATTN303::"
        "3 query heads cannot share 2 KV heads evenly; write a multiple of 2, such as `4 / 2`"
    )


def test_color_adds_only_escapes() -> None:
    import re

    plain = render(BAD, refusal(BAD.text).diagnostics, "human")
    colored = render(BAD, refusal(BAD.text).diagnostics, "human", color=True)
    assert "\x1b[" in colored and re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain


def test_bytes_that_are_no_text() -> None:
    data = b"attention a {\r\n    # \xff\r\n}"
    with pytest.raises(UnicodeDecodeError) as caught:
        Source.from_bytes("a.attn", data)
    error = not_utf8("a.attn", data, caught.value)
    assert error.source.position(error.diagnostics[0].span.start) == (2, 7)


def test_the_front_end_imports_nothing_slow() -> None:
    program = (
        "import sys; from dsl.check import load_spec; from dsl.source import Source; import dsl.fmt;"
        f"load_spec(Source.read({str(SPECS[0])!r}));"
        "print(sorted({'torch', 'triton', 'numpy', 'rich', 'click', 'jinja2'} & set(sys.modules)))"
    )
    assert run_python("-c", program).stdout.decode().strip() == "[]"


def test_numbers_of_any_length_are_answered() -> None:
    assert sys.get_int_max_str_digits() < 5000
    assert codes(block("prefill", f"mask = q < {'9' * 5000}")) == ["ATTN109"]


def test_the_reference_shows_valid_specs() -> None:
    text = (ROOT / "docs" / "language.md").read_text("utf-8")
    examples = text.split("```attn\n")[1:]
    assert len(examples) >= 3
    for example in examples:
        load(example.split("```")[0])


def test_the_reference_names_every_field() -> None:
    text = (ROOT / "docs" / "language.md").read_text("utf-8")
    for name in (*FIELDS, *FUNCTIONS, *BUILT_INS):
        assert f"`{name}`" in text or f"`{name}(" in text, name


def test_imports_of_a_module_are_no_names() -> None:
    for path in (ROOT / "generated").rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        imports = (node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)))
        names = {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}
        assert names <= MODULE_NAMES


@pytest.mark.parametrize("name", ["name", "torch", "contextlib", "operator", "print"])
def test_names_that_a_module_or_an_operator_library_needs(name: str) -> None:
    text = f"attention {name} {{ query = single kv = paged(block = 16) dtype = bf16 heads = 1 head_dim = 64 }}"
    with pytest.raises(SpecError) as caught:
        load_spec(Source.from_text(text))
    assert [finding.code for finding in caught.value.diagnostics] == ["ATTN209"]


def test_a_scale_that_float32_cannot_hold() -> None:
    text = "attention a { query = single kv = paged(block = 16) dtype = bf16 heads = 1 head_dim = 64 scale = 3e38 }"
    with pytest.raises(SpecError, match="larger than what float32 holds"):
        load_spec(Source.from_text(text))
