"""Emit: a module's text becomes a file, or a diff against the file that is there.

A file changes whole or not at all, and a file that somebody else wrote, or edited, is left alone.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Literal

from dsl.header import is_edited, is_generated

_TEMPORARY = ".attnspec-"
_ABANDONED_AFTER = 3600.0
"""Seconds."""


class EmitError(Exception):
    """The file at the target is not this tool's to overwrite."""


def emit(text: str, path: str | Path, *, force: bool = False) -> Literal["written", "unchanged"]:
    """Write `text` to `path` unless it stands there already. Raises OSError or EmitError.

    The folder must exist. `force` overwrites foreign and edited files.
    """
    path = Path(path)
    present = _read(path)
    if present == text:
        return "unchanged"
    if present is not None and not force:
        _refuse_foreign(present, path)
    # Before, so that what cannot be removed stops the change; after, since somebody may have imported meanwhile.
    _remove_bytecode(path)
    replace_file(path, text)
    _remove_bytecode(path)
    return "written"


def compare(text: str, path: str | Path) -> str | None:
    """The unified diff from the file to `text`, a missing file counting as empty; None where they agree."""
    present = _read(Path(path))
    if present == text:
        return None
    name = os.fspath(path)
    before = (present or "").splitlines(keepends=True)
    lines = difflib.unified_diff(before, text.splitlines(keepends=True), name, f"{name} (rendered)")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _read(path: Path) -> str | None:
    """The file's text, None where there is no file. Bytes that are not UTF-8 come back as characters never rendered."""
    _refuse_what_is_no_file(path)
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return None


def _refuse_foreign(present: str, path: Path) -> None:
    if not is_generated(present):
        raise EmitError(f"{path}: not written by attnspec; move it away, or overwrite it with --force")
    if is_edited(present):
        raise EmitError(f"{path}: edited since it was generated; move the edit into the spec, or drop it with --force")


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or leave it as it was. A new file's mode follows the umask, an old one keeps its own.

    A link's target is written, and what is no regular file is refused.
    """
    given, path = path, Path(os.path.realpath(path))
    temporary = path.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
    try:
        _refuse_what_is_no_file(path)
        _remove_abandoned(path.parent)
        with open(temporary, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            temporary.chmod(path.stat().st_mode & 0o7777)
        os.replace(temporary, path)
    except OSError as error:
        error.filename = os.fspath(given)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _remove_abandoned(folder: Path) -> None:
    """Drop what runs that were killed left behind; what is young may still be written by another process."""
    latest = time.time() - _ABANDONED_AFTER
    for temporary in folder.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if temporary.stat().st_mtime < latest:
                temporary.unlink()


def check_writable(path: Path) -> None:
    """Raise now the OSError that `replace_file` would raise later."""
    given, path = path, Path(os.path.realpath(path))
    try:
        _refuse_what_is_no_file(path)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        error.filename = os.fspath(given)
        raise


def _refuse_what_is_no_file(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))


def _remove_bytecode(path: Path) -> None:
    """Python takes a cached module for fresh by its time in seconds and its size; a quick rewrite can match both."""
    for cached in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        cached.unlink(missing_ok=True)
