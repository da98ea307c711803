"""Load: a generated file becomes a module. Triton reads the source of a kernel, so there must be a real file."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from dsl.header import short_hash


class LoadError(Exception):
    """The file exists but is no module that can be imported here."""


class _UncachedLoader(SourceFileLoader):
    """Compiles what the file says now: bytecode caches are neither trusted nor written."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def load(path: str | Path) -> ModuleType:
    """Import the module at `path` under a name of its own. Raises OSError or LoadError."""
    path = Path(path).resolve()
    name = f"{path.stem}_{short_hash(str(path).encode() + path.read_bytes())}"
    loader = _UncachedLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    previous = sys.modules.get(name)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException as error:
        if previous is None:
            del sys.modules[name]
        else:
            sys.modules[name] = previous
        if isinstance(error, Exception):
            raise LoadError(f"{path}: cannot be imported: {type(error).__name__}: {error}") from error
        raise
    return module
