"""Faults that were reported in public against other kernels, each with its right outcome, through the interpreter."""

from __future__ import annotations

import json
from functools import cache

import pytest

from tests.conftest import ROOT, run_python
from tests.public_faults import CASES


@cache
def outcomes() -> dict[str, str | None]:
    script = ROOT / "tests" / "public_faults.py"
    done = run_python(script, environment={"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_public_fault(name: str) -> None:
    problem = outcomes()[name]
    assert problem is None, problem
