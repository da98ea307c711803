"""Import a peer's library, or say in one line why there is none."""

from __future__ import annotations

import importlib
from types import ModuleType

from dsl.bench.peers.work import Absent


def library(*names: str) -> ModuleType:
    """The first of these modules that can be imported. Raises Absent."""
    reasons = []
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            reasons.append(f"no module {error.name}")
        except Exception as error:
            reasons.append(f"{name} cannot be imported: {one_line(error)}")
    raise Absent("; ".join(dict.fromkeys(reasons)))


def described(module: ModuleType) -> str:
    """A module by its name, and its version where it tells one."""
    package = importlib.import_module(module.__name__.partition(".")[0])
    version = getattr(module, "__version__", None) or getattr(package, "__version__", None)
    return f"{module.__name__} {version}" if version else module.__name__


def one_line(error: Exception) -> str:
    """The kind of an error and the first line that it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
