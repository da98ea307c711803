"""What the parser says: token names become the signs and words that the user wrote or should have written."""

from __future__ import annotations

import unicodedata

from lark import Token

from dsl.diagnostics import Diagnostic, quote
from dsl.items import span_of
from dsl.nodes import Name
from dsl.source import Span

_SIGNS = {
    "EQUAL": "=",
    "LBRACE": "{",
    "RBRACE": "}",
    "LSQB": "[",
    "RSQB": "]",
    "LPAR": "(",
    "RPAR": ")",
    "COMMA": ",",
    "COLON": ":",
    "FROM": "from",
}
_CLOSERS = ("COMMA", "RSQB", "RPAR")
_SUBSTITUTES = {
    "&": "write `and`",
    "|": "write `or`",
    "!": "write `not`",
    "~": "write `not`",
    "^": "there is no power operator; multiply, or use `exp`",
    ";": "nothing separates fields; a new line or a space will do",
    "'": "names and values take no quotes",
    '"': "names and values take no quotes",
    "?": "write `where(condition, a, b)`",
}


def _expected(accepts: set[str]) -> str:
    """The accepted terminals in words, the likeliest first."""
    words = []
    if "NUMBER" in accepts:
        words.append("a value")
    elif "NAME" in accepts:
        words.append("a name")
    closers = [terminal for terminal in _CLOSERS if terminal in accepts]
    if "PLUS" in accepts and not closers:
        words.append("an operator")
    if "$END" in accepts:
        words.append("a new field")
    rest = ("COLON", "EQUAL", "FROM", "LBRACE", "LSQB") if not {"NUMBER", "PLUS", "$END"} & accepts else ()
    words += [f"`{_SIGNS[terminal]}`" for terminal in (*rest, *closers) if terminal in accepts]
    if len(words) < 2:
        return "".join(words) or "nothing more"
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _owner(start: str, item: list[Token]) -> str:
    """What an item is about: ``the value of `mask` ``, ``param `slopes` ``."""
    names = [str(token) for token in item[:2] if token.type == "NAME"]
    if start == "field":
        return f"the value of {quote(names[0])}" if names else "the field"
    return f"{start} {quote(names[0])}" if names else f"the {start}"


def _found(token: Token) -> str:
    return f"the keyword `{token}`" if token.type != "NAME" and token.isalpha() else quote(token)


def unexpected(start: str, item: list[Token], position: int, accepts: set[str]) -> Diagnostic:
    token = item[position]
    message = f"expected {_expected(accepts)}, found {_found(token)}"
    return Diagnostic("ATTN104", span_of(token), message, _advice(start, item, position, accepts))


def _advice(start: str, item: list[Token], position: int, accepts: set[str]) -> str | None:
    token = item[position]
    if token.type == "EQUAL":
        return "write `==` to compare" if position > 1 else None
    if start == "field" and token.type == "COLON" and position == 1:
        return f"write `{quote(item[0], ticks=False)} = ...`"
    if start == "field" and position == 1 and token.type != "NAME":
        return "a field is written `name = value`"
    if token.type == "NAME" and "$END" in accepts:
        return f"if {quote(token)} is a field, write `{quote(token, ticks=False)} = ...`"
    if token.type == "NAME" and token == "if":
        return "write `where(condition, a, b)`"
    if token.type == "TIMES" and item[position - 1].type == "TIMES":
        return "there is no power operator; multiply, or use `exp`"
    if token.type in ("RPAR", "RSQB") and "$END" in accepts:
        return "nothing is open that it could close"
    return None


def unfinished(start: str, item: list[Token], accepts: set[str]) -> Diagnostic:
    last = item[-1]
    place = Span(span_of(last).end, span_of(last).end)
    owner = _owner(start, item)
    if start == "field" and len(item) == 1:
        return Diagnostic("ATTN105", place, f"expected `=` after {_found(last)}")
    if start == "field" and len(item) == 2:
        return Diagnostic("ATTN105", place, f"{owner} is missing", "`=` sets a field; to compare, write `==`")
    return Diagnostic("ATTN105", place, f"{owner} is unfinished: expected {_expected(accepts)} after {_found(last)}")


def strange_character(token: Token) -> Diagnostic:
    character = str(token)
    point = f"U+{ord(character):04X}"
    if character.isprintable() and not character.isspace():
        shown = f"`{character}`" if character.isascii() else f"`{character}` ({point})"
    else:
        shown = f"{point} ({unicodedata.name(character, 'a control character').lower()})"
    return Diagnostic("ATTN102", span_of(token), f"{shown} means nothing here", _SUBSTITUTES.get(character))


def malformed_number(token: Token) -> Diagnostic:
    text = str(token)
    advice = None
    if text.startswith(".") and text[1:].isdigit():
        advice = f"write `0{quote(text, ticks=False)}`"
    elif text.endswith(".") and text[:-1].isdigit():
        advice = f"write `{quote(text, ticks=False)}0`"
    elif text.replace("_", "").isdigit():
        advice = "write the digits without `_`"
    elif text.isascii() and text.isalnum():
        advice = "put a space or an operator between a number and a name"
    return Diagnostic("ATTN103", span_of(token), f"{quote(text)} is no number", advice)


def number_too_large(place: Span) -> Diagnostic:
    return Diagnostic("ATTN109", place, "number is too large", "integers end at 2147483647, floats at 3.4028235e+38")


def too_deep(place: Span, how: str) -> Diagnostic:
    return Diagnostic("ATTN108", place, f"expression is {how}")


def too_many_tokens(place: Span, most: int) -> Diagnostic:
    return Diagnostic("ATTN110", place, f"the file is too long: more than {most} words and signs", "split it")


def too_many_bytes(place: Span, most: int) -> Diagnostic:
    return Diagnostic("ATTN110", place, f"the file is too long: more than {most} bytes", "split it")


def stray_brace(place: Span) -> Diagnostic:
    return Diagnostic("ATTN107", place, "`}` closes no block")


def outside(item: list[Token]) -> Diagnostic:
    if item[0].type == "PARAM" or (len(item) > 1 and item[1].type == "EQUAL"):
        what = "a param" if item[0].type == "PARAM" else f"field {quote(item[0])}"
        return Diagnostic("ATTN107", span_of(item[0]), f"{what} stands outside of any block")
    message = f"expected `attention`, `dispatch` or `workload`, found {_found(item[0])}"
    if item[0].type == "STRANGE":
        return strange_character(item[0])
    return Diagnostic("ATTN107", span_of(item[0]), message)


def param_in_workload(place: Span) -> Diagnostic:
    return Diagnostic("ATTN107", place, "a workload has no params", "declare it in the attention block")


def unclosed(kind: str, name: Name, place: Span, head: Span) -> Diagnostic:
    return Diagnostic("ATTN106", place, f"{kind} {quote(name.text)} lacks its `}}`", None, ((head, "opened here"),))
