"""Benchmarks: the generated functions on a spec's workloads, timed where the oracle finds them right, beside peers.

`bench_files` and `tune_files` are the stage's public functions; `dsl.bench.peers.find` finds peers. Importing this
package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsl.bench.report import Report, Row
    from dsl.bench.runner import bench_files
    from dsl.bench.timing import NoGpu
    from dsl.bench.tune import TuneError, tune_files

_HOMES = {
    "NoGpu": "timing",
    "Report": "report",
    "Row": "report",
    "TuneError": "tune",
    "bench_files": "runner",
    "tune_files": "tune",
}

__all__ = ["NoGpu", "Report", "Row", "TuneError", "bench_files", "tune_files"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
