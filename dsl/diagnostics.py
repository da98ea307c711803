"""Findings about a spec: the record of one, the words they share, and the four forms in which they are printed.

The catalogue of all codes is in `catalogue.py`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dsl.catalogue import CATALOGUE as CATALOGUE
from dsl.catalogue import Entry as Entry
from dsl.source import Source, Span

Form = Literal["human", "short", "json", "github"]

SCHEMA = "attnspec.diagnostics/1"

MOST_FINDINGS = 100
"""More are cut off: nobody reads them, and a file of nothing but mistakes must not take long to answer."""

_LONGEST_WORD = 64
_MOST_COMPARED = 640
_WIDEST_LINE = 120
_TAB = "    "
_SYNONYMS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "fp8": "fp8_e4m3",
    "int": "int32",
    "long": "int64",
    "batch": "seq",
    "token": "q_token",
    "k": "kv",
    "head_idx": "h",
}


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding. `message` is lower case without a full stop; `help` says what to write instead."""

    code: str
    span: Span
    message: str
    help: str | None = None
    related: tuple[tuple[Span, str], ...] = ()


class SpecError(Exception):
    """The spec cannot be used. Carries every finding of the run, in the order of the text."""

    def __init__(self, source: Source, diagnostics: Iterable[Diagnostic]) -> None:
        self.source = source
        self.diagnostics = limited(diagnostics)
        super().__init__("\n".join(finding.message for finding in self.diagnostics))


def limited(findings: Iterable[Diagnostic]) -> list[Diagnostic]:
    """The findings, the last of them standing for all that a file has too many of."""
    found = sorted(findings, key=lambda finding: (finding.span.start, finding.span.end, finding.code))
    if len(found) <= MOST_FINDINGS:
        return found
    return [*found[:MOST_FINDINGS], too_many(found[MOST_FINDINGS].span)]


def too_many(place: Span) -> Diagnostic:
    """What stands for the findings that are cut off."""
    return Diagnostic("ATTN111", place, "too many mistakes: what follows is not reported", "correct the others first")


def not_utf8(name: str, data: bytes, error: UnicodeDecodeError) -> SpecError:
    """The finding about a file that cannot be decoded, with its place."""
    before = Source.from_bytes(name, data[: error.start])
    source = Source.from_bytes(name, data.decode("utf-8", "replace").encode())
    place = Span(len(before.text), len(before.text) + 1)
    byte = f"byte 0x{data[error.start]:02x} is no UTF-8"
    return SpecError(source, [Diagnostic("ATTN101", place, byte, "save the file as UTF-8")])


def quote(text: str, ticks: bool = True) -> str:
    """A word of the user's as a message shows it: in backticks, cut where it is long, and harmless to a terminal."""
    shown = _printable(text if len(text) <= _LONGEST_WORD else f"{text[:40]}...")
    return f"`{shown}`" if ticks else shown


def one_of(words: Sequence[str]) -> str:
    """`a`, `b` or `c`."""
    quoted = [f"`{word}`" for word in words]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that an unknown one is likely to stand for; of a great many only the first are looked at."""
    words = _first(known, _MOST_COMPARED)
    if _SYNONYMS.get(name) in words:
        return _SYNONYMS[name]
    if len(name) > _LONGEST_WORD:
        return None
    import difflib

    return next(iter(difflib.get_close_matches(name, words, n=1, cutoff=0.6)), None)


def _first(words: Iterable[str], characters: int) -> list[str]:
    """As many of the words as have that many characters in all."""
    taken = []
    for word in words:
        characters -= len(word)
        if characters < 0:
            break
        taken.append(word)
    return taken


def near(name: str, known: Iterable[str]) -> str | None:
    """`did you mean ...?` for a name that nobody knows."""
    match = nearest(name, known)
    return f"did you mean {quote(match)}?" if match else None


def render(source: Source, diagnostics: Iterable[Diagnostic], form: Form = "human", color: bool = False) -> str:
    """The findings as text that ends with a line end; empty where there is none."""
    findings = list(diagnostics)
    if form == "json":
        return _json(source, findings)
    if form == "human":
        paint = _paint if color else _plain
        return "\n".join(_human(source, finding, paint) for finding in findings)
    one = {"short": _short, "github": _github}[form]
    return "".join(one(source, finding) for finding in findings)


def record(source: Source, finding: Diagnostic) -> dict[str, object]:
    """One finding as an object of the JSON form."""
    related = [{"message": note, **_place(source, span)} for span, note in finding.related]
    return {
        "code": finding.code,
        "severity": "error",
        "message": finding.message,
        "help": finding.help,
        "file": source.name,
        **_place(source, finding.span),
        "related": related,
    }


def _place(source: Source, span: Span) -> dict[str, int]:
    line, column = source.position(span.start)
    end_line, end_column = source.position(span.end)
    return {"line": line, "column": column, "end_line": end_line, "end_column": end_column}


def _json(source: Source, findings: list[Diagnostic]) -> str:
    import json

    document = {"schema": SCHEMA, "diagnostics": [record(source, finding) for finding in findings]}
    return json.dumps(document, indent=2) + "\n"


def _short(source: Source, finding: Diagnostic) -> str:
    line, column = source.position(finding.span.start)
    return f"{_printable(source.name)}:{line}:{column}: error[{finding.code}]: {finding.message}\n"


def _github(source: Source, finding: Diagnostic) -> str:
    place = _place(source, finding.span)
    message = f"{finding.message}; {finding.help}" if finding.help else finding.message
    properties = {
        "file": _visible(source.name),
        "line": place["line"],
        "endLine": place["end_line"],
        "col": place["column"],
        "endColumn": place["end_column"],
        "title": finding.code,
    }
    listed = ",".join(f"{key}={_github_escape(str(value), ',:')}" for key, value in properties.items())
    return f"::error {listed}::{_github_escape(message)}\n"


def _github_escape(text: str, more: str = "") -> str:
    for character in "%\r\n" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def _human(source: Source, finding: Diagnostic, paint) -> str:
    """The finding over the lines that it is about, each with a caret below."""
    lines = [source.position(span.start)[0] for span in (finding.span, *(span for span, _ in finding.related))]
    gutter = len(str(max(lines)))
    margin = " " * gutter
    bar = paint("place", "|")
    text = f"{paint('error', f'error[{finding.code}]')}{paint('message', f': {finding.message}')}\n"
    text += _excerpt(source, finding.span, gutter, "-->", "", "error", paint)
    for span, note in finding.related:
        text += f"{margin} {bar}\n" + _excerpt(source, span, gutter, ":::", note, "place", paint)
    if finding.help:
        text += f"{margin} {bar}\n{margin} {paint('place', '=')} {paint('help', 'help')}: {finding.help}\n"
    return text


def _excerpt(source: Source, span: Span, gutter: int, arrow: str, note: str, style: str, paint) -> str:
    line, column = source.position(span.start)
    shown, before, width = _window(source.line(line), column - 1, span.end - span.start)
    marks = ("^" if style == "error" else "-") * width
    label = f" {note}" if note else ""
    bar, margin = paint("place", "|"), " " * gutter
    rows = (
        f"{margin}{paint('place', arrow)} {_printable(source.name)}:{line}:{column}",
        f"{margin} {bar}",
        f"{paint('place', f'{line:>{gutter}} |')} {shown}".rstrip(),
        f"{margin} {bar} {' ' * before}{paint(style, marks + label)}",
    )
    return "\n".join(rows) + "\n"


def _window(line: str, start: int, length: int) -> tuple[str, int, int]:
    """The part of a line worth showing, the columns before the marked part, and the columns of that part."""
    end = max(start, min(start + length, len(line)))
    left, right = 0, len(line)
    if right > _WIDEST_LINE:
        left = max(0, min(start - _WIDEST_LINE // 2, right - _WIDEST_LINE))
        right = left + _WIDEST_LINE
    prefix = "..." if left else ""
    suffix = "..." if right < len(line) else ""
    shown = prefix + _printable(line[left:right]) + suffix
    before = len(prefix) + _columns(line[left:start])
    return shown, before, max(1, _columns(line[start : min(end, right)]))


def _visible(text: str) -> str:
    """The text with nothing else that a terminal obeys than the line ends in it."""
    return "".join(character if character.isprintable() or character in "\r\n" else "\ufffd" for character in text)


def _printable(text: str) -> str:
    """The text without tabs and without anything that could move a terminal's cursor."""
    return "".join(
        _TAB if character == "\t" else character if character.isprintable() else "\ufffd" for character in text
    )


def _columns(text: str) -> int:
    """How many columns of a terminal the printable form of the text takes."""
    return sum(_width(character) for character in _printable(text))


def _width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


_STYLES = {"error": "1;31", "message": "1", "place": "1;34", "help": "1;36"}


def _paint(style: str, text: str) -> str:
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def _plain(style: str, text: str) -> str:
    return text
