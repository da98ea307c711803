"""Where the files that are no Python stand, in a checkout and in an installed wheel alike."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def templates_folder() -> Path:
    """The folder of the Jinja templates: packed into the wheel, beside the package in a checkout."""
    packed = _PACKAGE / "_templates"
    return packed if packed.is_dir() else _PACKAGE.parent / "templates"


def tuning_folder() -> Path:
    """The folder of the measured tile sizes."""
    return _PACKAGE / "tuning"
