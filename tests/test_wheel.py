"""What is installed is what runs: the wheel is opened, unpacked and used away from the checkout."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dsl.pipeline import generate, read_source
from tests.conftest import ROOT, SPECS, run_python


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    if importlib.util.find_spec("hatchling"):
        command.append("--no-build-isolation")
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (built,) = folder.glob("attnspec-*.whl")
    return built


def test_the_wheel_holds_everything(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    templates = {path.relative_to(ROOT / "templates").as_posix() for path in (ROOT / "templates").rglob("*.jinja")}
    assert {f"dsl/_templates/{name}" for name in templates} <= names
    tuning = {f"dsl/tuning/{path.name}" for path in (ROOT / "dsl" / "tuning").glob("*.json")}
    assert {"dsl/grammar.lark", *tuning} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    foreign = {name for name in names if not name.startswith(("dsl/", "attnspec-"))}
    assert not foreign
    assert not [name for name in names if name.endswith(".pyc")]


def test_an_installed_wheel_builds_the_same(wheel: Path, tmp_path: Path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    environment = {"PYTHONPATH": str(tmp_path / "site")}
    program = "import dsl, sys; print(dsl.__file__); dsl.build(sys.argv[1], 'generated')"
    for spec in SPECS:
        run = run_python("-c", program, spec, cwd=tmp_path, environment=environment)
        assert run.returncode == 0, run.stderr.decode()
        assert run.stdout.decode().startswith(str(tmp_path / "site"))
        built = tmp_path / "generated" / f"{spec.stem}.py"
        assert built.read_text(encoding="utf-8") == generate(read_source(spec))
