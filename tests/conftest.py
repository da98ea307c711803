"""What tests share: the checkout's folders, the command line, and which tests this machine can run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SPECS = sorted((ROOT / "specs").glob("*.attn"))
MODELS = sorted((ROOT / "specs" / "models").glob("*.attn"))

DECODE = """
attention small {
    query    = single
    kv       = paged(block = 16)
    dtype    = bf16
    heads    = 8 / 2
    head_dim = 64
}
"""


def run_python(
    *arguments: str | Path, cwd: Path = ROOT, environment: Mapping[str, str] | None = None, input: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run this interpreter on the checkout's package, whatever the working folder."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(_search_path()), **(environment or {})}
    command: Sequence[str] = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=variables, input=input, capture_output=True)


def _search_path() -> list[str]:
    """The checkout, behind what stands before it already: a second version of Triton may."""
    return [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(ROOT)]


def run_attnspec(*arguments: str | Path, **options) -> subprocess.CompletedProcess[bytes]:
    return run_python("-m", "dsl", *arguments, **options)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests that were asked for on a machine without one are printed as skipped, never as passed."""
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting and not _has_gpu():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="not run: no GPU here"))


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
