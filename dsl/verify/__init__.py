"""Verification: generated functions beside a dense float64 oracle, on batches made to break them.

`verify` is the stage's one public function. Importing this package imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dsl.source import Source
    from dsl.verify.report import Report, Row

__all__ = ["verify"]


def verify(
    specs: Sequence[str | Path | Source],
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    output_dir: str | Path | None = None,
    progress: Callable[[Row], None] | None = None,
    only: Collection[str] | None = None,
) -> Report:
    """Verify every function of some spec files against the oracle; see `dsl.verify.runner.verify_files`."""
    from dsl.verify.runner import verify_files

    return verify_files(specs, device=device, output_dir=output_dir, progress=progress, only=only)
