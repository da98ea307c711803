"""Lines that are too long because of what a spec calls its params, broken as a formatter would break them."""

from __future__ import annotations

import re

WIDTH = 120
_BRACKETED = re.compile(r"^( *)([^#\"'(]*\()([^#\"'()]*)(\)[^()#\"']*)$")
_UNPACKED = re.compile(r"^( *)([\w, ]+)( = \w+)$")


def fit(text: str) -> str:
    """Break every line of a list of names that is wider than a page."""
    return "\n".join("\n".join(_broken(line)) if len(line) > WIDTH else line for line in text.split("\n"))


def _broken(line: str) -> list[str]:
    """`head(` and `)` on lines of their own; what is between on one line where it fits, else a line for each."""
    found = _BRACKETED.match(line)
    if found is not None:
        indent, head, items, tail = found.groups()
        if len(indent) + 4 + len(items) <= WIDTH:
            return [f"{indent}{head}", f"{indent}    {items}", f"{indent}{tail}"]
        return [f"{indent}{head}", *_items(indent, items), f"{indent}{tail}"]
    found = _UNPACKED.match(line)
    if found is not None:
        indent, items, tail = found.groups()
        return [f"{indent}(", *_items(indent, items), f"{indent}){tail}"]
    return [line]


def _items(indent: str, items: str) -> list[str]:
    return [f"{indent}    {item.strip()}," for item in items.split(",")]
