"""What the process's exit status says."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Ordered by gravity: a run over several files ends with the gravest."""

    YES = 0
    NO = 1
    COULD_NOT_ASK = 2
    INTERRUPTED = 130
