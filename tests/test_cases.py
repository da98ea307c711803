"""Every message of the tool, as files: `cases/NAME.attn` beside `cases/NAME.txt`, which holds what must be printed.

ATTN_UPDATE=1 writes the .txt files anew; look at the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsl.check import load_spec
from dsl.diagnostics import CATALOGUE, SpecError, not_utf8, render
from dsl.plan import plan_module
from dsl.source import Source

CASES = sorted((Path(__file__).parent / "cases").glob("*.attn"))
UPDATE = os.environ.get("ATTN_UPDATE") == "1"


def _refusal(path: Path) -> SpecError:
    """What is wrong with a spec, up to and including its plan."""
    data = path.read_bytes()
    try:
        spec_file = load_spec(Source.from_bytes(path.name, data))
        plan_module(spec_file)
    except UnicodeDecodeError as error:
        return not_utf8(path.name, data, error)
    except SpecError as error:
        return error
    raise AssertionError(f"{path.name} has nothing wrong with it")


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path: Path) -> None:
    refusal = _refusal(path)
    printed = render(refusal.source, refusal.diagnostics, "human", color=False)
    expected = path.with_suffix(".txt")
    if UPDATE:
        expected.write_text(printed, "utf-8")
    assert printed == expected.read_text("utf-8")


def test_every_code_has_a_case() -> None:
    named = {path.stem.upper() for path in CASES}
    assert set(CATALOGUE) <= named


@pytest.mark.parametrize("code", CATALOGUE)
def test_a_case_shows_its_code(code: str) -> None:
    path = Path(__file__).parent / "cases" / f"{code.lower()}.txt"
    assert f"error[{code}]" in path.read_text("utf-8")


def test_no_text_without_a_case() -> None:
    texts = {path.stem for path in (Path(__file__).parent / "cases").glob("*.txt")}
    assert texts == {path.stem for path in CASES}
