"""The road from a spec to a module's text, walked in one call: parse, check, plan, render."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from dsl.diagnostics import not_utf8
from dsl.emit import emit
from dsl.source import Source, read_bytes

_SHADOWED = frozenset({"torch", "triton"}) | frozenset(sys.stdlib_module_names)
_RUN_BY_ITSELF = re.compile(r"__\w+__|sitecustomize|usercustomize|conftest")
"""Names of files that Python or pytest runs though nobody imports them by name."""


class NameRefused(Exception):
    """A spec whose name can be no module's name."""


def module_name(spec_name: str) -> str:
    """The name of the module that a spec file becomes. Raises NameRefused."""
    stem = Path(spec_name).name.removesuffix(".attn")
    if not (stem.isascii() and stem.isidentifier()) or keyword.iskeyword(stem):
        raise NameRefused(f"{spec_name}: {stem!r} is no name for a Python module; rename the spec")
    if stem in _SHADOWED:
        raise NameRefused(f"{spec_name}: a module named {stem!r} would hide the library; rename the spec")
    if _RUN_BY_ITSELF.fullmatch(stem):
        raise NameRefused(f"{spec_name}: a file named {stem}.py is run without being asked for; rename the spec")
    return stem


def read_source(path: str | Path) -> Source:
    """Read a spec file. Raises OSError, or SpecError where the file is not UTF-8."""
    return decode_source(str(path), read_bytes(path))


def decode_source(name: str, data: bytes) -> Source:
    """A spec from its bytes. Raises SpecError."""
    try:
        return Source.from_bytes(name, data)
    except UnicodeDecodeError as error:
        raise not_utf8(name, data, error) from error


def generate(source: Source, targets: Sequence[str] | None = None) -> str:
    """The text of the generated module. Raises SpecError."""
    from dsl.check import load_spec
    from dsl.plan import plan_module
    from dsl.render import render

    return render(plan_module(load_spec(source), targets))


def build(
    spec: str | Path,
    output: str | Path = "generated",
    *,
    targets: Sequence[str] | None = None,
    force: bool = False,
) -> Path:
    """Write `output/<stem>.py` for a spec file, unless it stands there already, and return its path.

    Raises SpecError, OSError, NameRefused or EmitError.
    """
    return build_source(read_source(spec), output, targets=targets, force=force)


def build_source(
    source: Source, output: str | Path, *, targets: Sequence[str] | None = None, force: bool = False
) -> Path:
    """The same for a spec that was read already."""
    path = Path(output) / f"{module_name(source.name)}.py"
    text = generate(source, targets)
    path.parent.mkdir(parents=True, exist_ok=True)
    emit(text, path, force=force)
    return path
