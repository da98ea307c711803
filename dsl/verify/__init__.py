"""Verification: generated functions beside a dense float64 oracle, on batches made to break them.

`verify_files` is the stage's one public function. Importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsl.verify.report import Report, Row
    from dsl.verify.runner import verify_files

__all__ = ["Report", "Row", "verify_files"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{'runner' if name == 'verify_files' else 'report'}"), name)
