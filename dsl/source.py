"""A spec's text and the places in it: what every later stage points at when it speaks to the user."""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import BinaryIO

MOST_BYTES = 2**20
"""What a spec may hold. Not more than a byte beyond it is read, whatever the file is."""

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_NO_NAME = re.compile("[^A-Za-z0-9_]")


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Half-open range of character offsets into `Source.text`."""

    start: int
    end: int

    def to(self, other: Span) -> Span:
        """The smallest span that covers both."""
        return Span(min(self.start, other.start), max(self.end, other.end))


@dataclass(frozen=True, slots=True)
class Source:
    """One spec file. `text` has no byte-order mark and only LF line ends; `data` are the bytes as they were read."""

    name: str
    text: str
    data: bytes = field(repr=False)
    _line_starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        starts = [0]
        starts.extend(i + 1 for i, character in enumerate(self.text) if character == "\n")
        object.__setattr__(self, "_line_starts", tuple(starts))

    @classmethod
    def from_bytes(cls, name: str, data: bytes) -> Source:
        """Decode UTF-8, with or without a byte-order mark. Raises UnicodeDecodeError.

        Bytes that are too many are refused whatever they say, so a character that is cut there does not matter.
        """
        text = data.decode("utf-8", "replace" if len(data) > MOST_BYTES else "strict").removeprefix("\ufeff")
        return cls(name, text.replace("\r\n", "\n").replace("\r", "\n"), data)

    @classmethod
    def from_text(cls, text: str, name: str = "<text>") -> Source:
        """A spec from a string. Half of a surrogate pair, which no encoding has, becomes U+FFFD."""
        return cls.from_bytes(name, _LONE_SURROGATE.sub("\ufffd", text).encode())

    @classmethod
    def read(cls, path: str | Path) -> Source:
        """Read a file. Raises OSError or UnicodeDecodeError."""
        return cls.from_bytes(str(path), read_bytes(path))

    @property
    def stem(self) -> str:
        """The name without folders and suffix, and with nothing in it that could end a comment or a string."""
        return _NO_NAME.sub("_", PurePath(self.name).name.removesuffix(".attn"))

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column of an offset, both counted from 1."""
        line = bisect.bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1

    def line(self, number: int) -> str:
        """The text of line `number` (from 1), without its line end."""
        start = self._line_starts[number - 1]
        end = self.text.find("\n", start)
        return self.text[start:] if end < 0 else self.text[start:end]


def read_bytes(path: str | Path) -> bytes:
    """The bytes of a spec file, and at most one more than it may have. Raises OSError."""
    with open(path, "rb") as file:
        return read_at_most(file)


def read_at_most(file: BinaryIO) -> bytes:
    return file.read(MOST_BYTES + 1)
