"""Verify spec files: build each one's module, run it in a process of its own, and collect what it says."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal

from dsl.check import load_spec
from dsl.pipeline import build_source, module_name, read_source
from dsl.source import Source
from dsl.verify.report import Report, Row

Device = Literal["auto", "cpu", "cuda"]

_NOT_RUN_ON_CPU = (
    "kernels on a GPU: this machine has none, so portable kernels ran in Triton's interpreter",
    "workloads at full size: their batches were cut down for the interpreter",
)


def verify_files(
    specs: Sequence[str | Path | Source],
    *,
    device: Device = "auto",
    output_dir: str | Path | None = None,
    progress: Callable[[Row], None] | None = None,
    only: Collection[str] | None = None,
) -> Report:
    """Verify every function of some spec files, given by path or as they were read, against the oracle.

    A mismatch or a crash is a row of the report, not an exception. `output_dir` is a folder of generated modules to
    verify as they stand; without it they are built afresh. `only` names the blocks and dispatches that are wanted.
    Raises what `dsl.pipeline.build` raises.
    """
    where = _find_device() if device == "auto" else device
    sources = [spec if isinstance(spec, Source) else read_source(spec) for spec in specs]
    problem = "no block or dispatch has that name"
    unknown = unknown_names(sources, only or ())
    rows = [Row("", name, "", "", "", passed=False, seconds=0.0, problem=problem) for name in unknown]
    with tempfile.TemporaryDirectory() as folder:
        modules = [
            build_source(source, Path(folder) / str(place))
            if output_dir is None
            else Path(output_dir) / f"{module_name(source.name)}.py"
            for place, source in enumerate(sources)
        ]
        for source, module in zip(sources, modules, strict=True):
            for row in _verify_file(source, module, where, only):
                rows.append(row)
                if progress is not None:
                    progress(row)
    is_cpu = where == "cpu"
    return Report("cpu (Triton's interpreter)" if is_cpu else where, tuple(rows), _NOT_RUN_ON_CPU if is_cpu else ())


def unknown_names(sources: Sequence[Source], only: Collection[str]) -> list[str]:
    """Those of the wanted names that no file has."""
    files = [load_spec(source) for source in sources]
    known = {item.name for file in files for item in (*file.attentions, *file.dispatches)}
    return [name for name in only if name not in known]


def _find_device() -> Literal["cpu", "cuda"]:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _verify_file(source: Source, module: Path, device: str, only: Collection[str] | None) -> Iterator[Row]:
    """Rows as the worker finds them, and one more if it dies."""
    request = {
        "name": source.name,
        "text": source.text,
        "module": str(module),
        "device": device,
        "only": None if only is None else list(only),
    }
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        worker = subprocess.Popen(
            [sys.executable, "-m", "dsl.verify.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_environment(device),
            encoding="utf-8",
            errors="replace",
        )
        assert worker.stdin is not None and worker.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError), worker.stdin:
                worker.stdin.write(json.dumps(request))
            last = "the start"
            for line in worker.stdout:
                _, separator, record = line.partition("\x1e")
                if separator:
                    row = Row(**json.loads(record))
                    last = f"{row.function}, {row.case}"
                    yield row
            status = worker.wait()
        finally:
            worker.kill()
            worker.wait()
        if status != 0:
            errors.seek(0)
            lines = [line for line in errors.read().splitlines() if line.strip()]
            problem = f"the process ended with status {status} after {last}: {lines[-1] if lines else 'no message'}"
            yield Row(source.name, module.stem, "", "", "", passed=False, seconds=0.0, problem=problem)


def _environment(device: str) -> dict[str, str]:
    """The interpreter's switch is read when Triton is imported, so it must stand before the process starts."""
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    package_root = str(Path(__file__).resolve().parents[2])
    present = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{present}{os.pathsep}{package_root}" if present else package_root
    return environment
