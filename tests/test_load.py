from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

from dsl.load import LoadError, load


def test_loads_what_the_file_says_now(tmp_path: Path):
    path = tmp_path / "decode.py"
    path.write_text("def f():\n    return 1\n")
    first = load(path)
    path.write_text("def f():\n    return 2\n")
    second = load(path)
    assert (first.f(), second.f()) == (1, 2)
    assert first.__name__ != second.__name__
    assert sys.modules[second.__name__] is second
    assert not (tmp_path / "__pycache__").exists()


def test_two_files_of_one_name_are_two_modules(tmp_path: Path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "decode.py").write_text("x = 1\n")
    assert load(tmp_path / "a" / "decode.py").__name__ != load(tmp_path / "b" / "decode.py").__name__


def test_source_can_be_read_back(tmp_path: Path):
    path = tmp_path / "decode.py"
    path.write_text("def f():\n    return 1  # here\n")
    assert "# here" in inspect.getsource(load(path).f)


@pytest.mark.parametrize("text", ["def", "import nothing_of_that_name", "1 / 0"])
def test_a_module_that_fails_is_named_and_forgotten(tmp_path: Path, text: str):
    path = tmp_path / "decode.py"
    path.write_text(text)
    known = set(sys.modules)
    with pytest.raises(LoadError, match=r"decode\.py: cannot be imported"):
        load(path)
    assert set(sys.modules) == known


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "decode.py")
