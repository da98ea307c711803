"""`generated/` is what the specs render to, and would pass a reviewer's tools."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dsl.cli.group import group
from tests.conftest import MODELS, ROOT, SPECS

GENERATED = ROOT / "generated"
RULES = "E,F,I,W"


FOLDERS = [*((spec, GENERATED) for spec in SPECS), *((spec, GENERATED / "models") for spec in MODELS)]


@pytest.mark.parametrize(("spec", "folder"), FOLDERS, ids=lambda path: path.stem)
def test_goldens_are_up_to_date(spec: Path, folder: Path):
    run = CliRunner().invoke(group, ["build", "--diff", str(spec), "-o", str(folder)])
    assert run.exit_code == 0, run.output


def test_every_golden_has_its_spec():
    assert {path.stem for path in GENERATED.glob("*.py")} == {spec.stem for spec in SPECS}
    assert {path.stem for path in (GENERATED / "models").glob("*.py")} == {spec.stem for spec in MODELS}


@pytest.mark.parametrize(
    "arguments", [("format", "--check", "--diff"), ("check", "--select", RULES)], ids=["format", "lint"]
)
def test_goldens_pass_ruff(arguments: tuple[str, ...]):
    command = [sys.executable, "-m", "ruff", *arguments, "--isolated", "--line-length", "120", GENERATED]
    run = subprocess.run([*command], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
