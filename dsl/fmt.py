"""The formatter: spacing and indentation become regular; comments, order and the author's line breaks stay.

It works on tokens and the gaps between them, so what it prints are exactly the tokens that it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from lark import Token

from dsl.check.layouts import SPEC_FIELDS as LAYOUT_FIELDS
from dsl.diagnostics import SpecError
from dsl.items import CLOSING, HEADS, OPENING, cut, span_of
from dsl.printer import print_spec as print_spec
from dsl.source import Source, Span
from dsl.syntax import parse, tokens_of

_INDENT = "    "
_BLOCKS = (*HEADS, "DISPATCH")
_JOINED_AFTER = (*_BLOCKS, "FROM", "PARAM", "EQUAL", "COLON")
_JOINED_BEFORE = ("FROM", "EQUAL", "COLON", "LBRACE")


@dataclass
class _Piece:
    """A token. `field` is the first word of its item; `continues` if a line that begins with it is a continuation."""

    text: str
    kind: str
    span: Span
    field: str
    starts_item: bool
    continues: bool
    breaks: bool = False


@dataclass
class _Line:
    """A line of output. `marks` are the places in it that stand in one column with those of its neighbours."""

    depth: int
    block: int
    text: str
    comment: str = ""
    marks: dict[str, int] = field(default_factory=dict)

    def pad(self, mark: str, column: int) -> None:
        place = self.marks[mark]
        added = column - place
        self.text = self.text[:place] + " " * added + self.text[place:]
        self.marks = {name: at + added if at >= place else at for name, at in self.marks.items()}


def format_source(source: Source) -> str:
    """The formatted text. Raises SpecError where the text cannot be parsed."""
    file = parse(source)
    if file.diagnostics:
        raise SpecError(source, file.diagnostics)
    pieces = list(_pieces(tokens_of(source)))
    _break_tall_blocks(source.text, pieces)
    lines = _Lines()
    before = None
    for piece in pieces:
        lines.add(before, source.text[before.span.end if before else 0 : piece.span.start], piece)
        before = piece
    lines.end(source.text[before.span.end if before else 0 :], before)
    _align(lines.lines)
    return "".join(f"{line.text}{line.comment}".rstrip() + "\n" for line in lines.lines)


def _pieces(tokens: list[Token]) -> Iterator[_Piece]:
    for item in cut(tokens):
        brackets = 0
        before = ""
        for position, token in enumerate(item):
            kind = token.type
            if kind == "MINUS" and before not in ("NAME", "NUMBER", *CLOSING):
                kind = "SIGN"
            continues = position > 0 and brackets == 0
            yield _Piece(str(token), kind, span_of(token), str(item[0]), position == 0, continues)
            brackets += (kind in OPENING) - (kind in CLOSING)
            before = kind


def _break_tall_blocks(text: str, pieces: list[_Piece]) -> None:
    """A block whose braces stand on different lines has its braces at the ends of lines; a block begins a line."""
    opened = 0
    for position, piece in enumerate(pieces):
        if piece.kind == "LBRACE":
            opened = position
        elif piece.kind == "RBRACE" and "\n" in text[pieces[opened].span.end : piece.span.start]:
            piece.breaks = pieces[opened + 1].breaks = True
        elif piece.kind in _BLOCKS:
            piece.breaks = True


class _Lines:
    """The lines written so far. `opened` holds the depths of the lines in which open brackets stand."""

    def __init__(self) -> None:
        self.lines: list[_Line] = []
        self.block = 0
        self.opened: list[int] = []

    def add(self, before: _Piece | None, gap: str, piece: _Piece) -> None:
        """Write a token and the gap before it."""
        joined = before is not None and (before.kind in _JOINED_AFTER or piece.kind in _JOINED_BEFORE)
        if before is None or piece.breaks or "#" in gap or ("\n" in gap and not joined):
            self._begin(before, gap, piece)
        else:
            self._go_on(before, piece)
        if piece.kind in (*OPENING, "LBRACE"):
            self.opened.append(self.lines[-1].depth)
        elif piece.kind in (*CLOSING, "RBRACE"):
            self.opened.pop()
        self.block += piece.kind == "LBRACE"

    def end(self, gap: str, before: _Piece | None) -> None:
        self._comments(gap, before, 0, empty_at_end=False)
        for line in self.lines:
            if line.text.endswith("{"):
                line.marks.clear()

    def _begin(self, before: _Piece | None, gap: str, piece: _Piece) -> None:
        inside = self.opened[-1] + 1 if self.opened else 0
        closes = piece.kind in (*CLOSING, "RBRACE")
        depth = self.opened[-1] if closes else inside + piece.continues
        self._comments(gap, before, max(depth, inside), empty_at_end=not closes)
        self._line(depth, piece.text)
        if piece.starts_item and piece.kind == "NAME":
            self.lines[-1].marks["="] = len(self.lines[-1].text)

    def _go_on(self, before: _Piece, piece: _Piece) -> None:
        line = self.lines[-1]
        if piece.kind in ("FROM", "LBRACE") and line.depth == 0:
            line.marks[piece.kind] = len(line.text)
        line.text += _space(before, piece) + piece.text

    def _comments(self, gap: str, before: _Piece | None, depth: int, empty_at_end: bool) -> None:
        """Write the comments of a gap; of several empty lines in a row one is left."""
        rows = [row.strip(" \t") for row in gap.split("\n")]
        if before is not None:
            self.lines[-1].comment = rows.pop(0)
        empty = False
        for number, row in enumerate(rows, 1):
            if row or (number == len(rows) and empty_at_end):
                self._empty_line(empty)
            if row:
                self._line(depth, row)
            empty = not row

    def _line(self, depth: int, text: str) -> None:
        self.lines.append(_Line(depth, self.block, _INDENT * depth + text))

    def _empty_line(self, wanted: bool) -> None:
        if wanted and self.lines and not self.lines[-1].text.endswith("{"):
            self.lines.append(_Line(0, self.block, ""))


def _space(before: _Piece, piece: _Piece) -> str:
    """What stands between two tokens of a line."""
    if before.kind in (*OPENING, "SIGN") or piece.kind in (*CLOSING, "COMMA"):
        return ""
    if (before.kind, piece.kind) == ("LBRACE", "RBRACE") or (before.kind == "NAME" and piece.kind in OPENING):
        return ""
    if piece.field in LAYOUT_FIELDS and {"DIVIDE", "MODULO"} & {before.kind, piece.kind}:
        return ""
    return "  " if piece.starts_item and piece.kind != "RBRACE" and before.kind != "LBRACE" else " "


def _align(lines: list[_Line]) -> None:
    """The equal signs of a block stand in one column, the comments of a paragraph, the braces of rows of blocks."""
    _in_one_column("=", [line for line in lines if "=" in line.marks], lambda line: line.block)
    for mark in ("FROM", "LBRACE"):
        _in_one_column(mark, lines, lambda line, mark=mark: mark in line.marks)
    paragraph = 0
    for line in lines:
        paragraph += not line.text
        line.block, line.marks["#"] = paragraph, len(line.text)
    commented = [line for line in lines if line.comment]
    _in_one_column("#", commented, lambda line: (line.block, line.depth))
    for line in commented:
        line.text += "  "


def _in_one_column(mark: str, lines: list[_Line], key: Callable[[_Line], object]) -> None:
    for _, neighbours in groupby(lines, key=key):
        group = [line for line in neighbours if mark in line.marks]
        column = max((line.marks[mark] for line in group), default=0)
        for line in group:
            line.pad(mark, column)
