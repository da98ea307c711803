"""The compatibility table, by trial: what this machine has of it is installed and tested, the rest is said not to be.

    python -m tests.compatibility pythons     everything that needs no torch, under every Python that is installed
    python -m tests.compatibility tritons     the compile tests, under every release of Triton that is supported

Each environment is made once, in `.compat/`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TRITONS = ("3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0")
FOLDER = ROOT / ".compat"
PINNED = ("click", "jinja2", "lark", "rich", "pytest", "pytest-xdist", "ruff")
UNPINNED = ("hypothesis",)
"""No one release of it runs under every Python."""

WITHOUT_TORCH = (
    *(
        "abuse_files",
        "abuse_fuzz",
        "abuse_specs",
        "abuse_streams",
        "cases",
        "check",
        "cli",
        "emit",
        "fmt",
        "fuzz",
        "golden",
    ),
    *("hopper_model", "imports", "load", "parse", "plot", "reproducible", "templates"),
)
NEEDS_TORCH = "not bench and not tune and not verify and not flash_attention"


def pin(library: str) -> str:
    (line,) = re.findall(rf"^{library}[<=].*$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    return line


def find_python(version: str) -> str | None:
    """The path of a Python that runs; a name on the path may be no more than a promise."""
    managed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), reverse=True)
    for candidate in (shutil.which(f"python{version}"), *map(str, managed)):
        program = "import sys; print(*sys.version_info[:2], sep='.')"
        if candidate is not None:
            run = subprocess.run([candidate, "-c", program], capture_output=True, text=True)
            if run.returncode == 0 and run.stdout.strip() == version:
                return candidate
    return None


def python_passes(version: str, workers: str) -> bool | None:
    found = find_python(version)
    if found is None:
        return None
    home = FOLDER / f"python{version}"
    if not (home / "ready").exists():
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([found, "-m", "venv", home], check=True)
        command = [home / "bin" / "python", "-m", "pip", "install", "--quiet", *map(pin, PINNED), *UNPINNED]
        subprocess.run(command, check=True)
        (home / "ready").touch()
    tests = [f"tests/test_{name}.py" for name in WITHOUT_TORCH]
    return _pytest(home / "bin" / "python", workers, [*tests, "-k", NEEDS_TORCH], PYTHONPATH=str(ROOT))


def triton_passes(version: str, workers: str) -> bool:
    home = FOLDER / f"triton{version}"
    if not (home / "ready").exists():
        shutil.rmtree(home, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", home]
        subprocess.run([*command, f"triton=={version}"], check=True)
        (home / "ready").touch()
    return _pytest(sys.executable, workers, ["-m", "compile"], PYTHONPATH=str(home))


def _pytest(python: str | Path, workers: str, arguments: list[str], **variables: str) -> bool:
    command = [python, "-m", "pytest", "-q", "-n", workers, *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}).returncode == 0


def main() -> None:
    kind, workers = sys.argv[1], os.environ.get("JOBS", "auto")
    if kind == "pythons":
        answers = {f"Python {version}": python_passes(version, workers) for version in PYTHONS}
    else:
        answers = {f"Triton {version}": triton_passes(version, workers) for version in TRITONS}
    for name, passed in answers.items():
        print(f"{name:14} {'not run: not installed here' if passed is None else 'passed' if passed else 'FAILED'}")
    sys.exit(False in answers.values())


if __name__ == "__main__":
    main()
