"""The standard streams as a command finds them: whichever the caller has closed is in words what it is."""

from __future__ import annotations

import errno
import io
import os
import sys


class _Closed(io.TextIOBase):
    """Stands for stdout where it is closed, so that an answer with nowhere to go is an error like a full disk."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, "is closed", "stdout")


def prepare() -> None:
    """Make every stream usable. What is closed keeps its number, lest a file that is opened later take it."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = _Closed()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
