"""Import a peer's library, or say in one line why there is none."""

from __future__ import annotations

import importlib
import sys
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
    """A module by its name, and the version that it, or a package around it, tells."""
    name = module.__name__
    homes = (name.rsplit(".", steps)[0] for steps in range(name.count(".") + 1))
    versions = (getattr(sys.modules.get(home, module), "__version__", None) for home in homes)
    version = next(filter(None, versions), None)
    return f"{name} {version}" if version else name


def one_line(error: Exception) -> str:
    """The kind of an error and the first line that it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
