"""What a benchmark found: one row for each block and workload case, with the peers beside it, and the same as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dsl.bench.measure import Ceilings, Machine, Mode

VERSION = 2
SCHEMA = f"attnspec.bench/{VERSION}"
Status = Literal["PASSED", "INCORRECT_NUMERICAL", "RUNTIME_ERROR", "LEFT_OUT"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a row was measured on, in numbers. `q_tokens` and `kv_tokens` are those of all sequences together."""

    family: str
    dtype: str
    heads: int
    kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    seqs: int
    q_tokens: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Beside:
    """Another function on a row's inputs, timed in the same rounds: a peer, or our own under `softmax = online`.

    Where `status` is not PASSED there are no times, and `problem` says why; LEFT_OUT is a case that a peer cannot take.
    """

    status: Status
    mode: Mode | None = None
    us: float | None = None
    eager_us: float | None = None
    tb_per_s: float | None = None
    tflop_per_s: float | None = None
    error: float | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One block on one case. Where `status` is not PASSED there are no times, and `problem` says why.

    `bytes` and `flops` are what the case needs at least; percentages are of this machine's own copy and matmul.
    `eager_us` is one call as Python sees it, its launch included. `ratio` is the best peer's time over ours. `online`
    is there where `softmax = online` would be another kernel than the one that was timed.
    """

    file: str
    block: str
    case: str
    status: Status
    bytes: int = 0
    flops: int = 0
    mode: Mode | None = None
    latency_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    eager_us: float | None = None
    tb_per_s: float | None = None
    tflop_per_s: float | None = None
    copy_percent: float | None = None
    matmul_percent: float | None = None
    error: float | None = None
    bar: float | None = None
    problem: str | None = None
    shape: Shape | None = None
    peers: Mapping[str, Beside] = field(default_factory=dict)
    ratio: float | None = None
    online: Beside | None = None

    @property
    def passed(self) -> bool:
        return self.status == "PASSED"


@dataclass(frozen=True, slots=True)
class Report:
    """All rows of a run. `not_timed` says which of the blocks that were asked for have no row, and why.

    `peers` says where each peer that was asked comes from, `absent` why others cannot be had here. What becomes of a
    peer does not decide whether the report passes.
    """

    machine: Machine
    ceilings: Ceilings
    rows: tuple[Row, ...]
    not_timed: tuple[str, ...] = ()
    peers: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.passed for row in self.rows)

    @property
    def failures(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.passed)

    @property
    def remarks(self) -> tuple[str, ...]:
        """One line for each peer and reason for which it has no time in some rows, and for each that is not here."""
        rows_of: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            for name, peer in row.peers.items():
                if peer.status != "PASSED":
                    rows_of.setdefault((name, _reason(peer)), []).append(row)
        lines = [f"{name} {reason}: {_places(rows)}" for (name, reason), rows in rows_of.items()]
        return (*lines, *(f"{name} is not here: {reason}" for name, reason in self.absent.items()))

    def to_dict(self) -> dict[str, Any]:
        """For JSON: an error that is infinite becomes the text `inf`."""
        return {
            "schema": SCHEMA,
            "passed": self.passed,
            "machine": dataclasses.asdict(self.machine),
            "copy_tb_per_s": self.ceilings.copy / 1e12,
            "matmul_tflop_per_s": {dtype: rate / 1e12 for dtype, rate in self.ceilings.matmul.items()},
            "peers": dict(self.peers),
            "absent": dict(self.absent),
            "not_timed": list(self.not_timed),
            "rows": [_plain(dataclasses.asdict(row)) for row in self.rows],
        }


def _reason(peer: Beside) -> str:
    """What became of a peer that was not timed, in one line."""
    word = {"INCORRECT_NUMERICAL": "is WRONG", "RUNTIME_ERROR": "FAILED", "LEFT_OUT": "is left out"}[peer.status]
    return f"{word} ({(peer.problem or '').strip().partition(chr(10))[0]})"


def _places(rows: list[Row]) -> str:
    """Where the rows are: `block (3 cases)`, or the case where a block has one of them."""
    cases: dict[str, list[str]] = {}
    for row in rows:
        cases.setdefault(row.block, []).append(row.case)
    return ", ".join(
        f"{block} ({found[0] if len(found) == 1 else f'{len(found)} cases'})" for block, found in cases.items()
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    return str(value) if value == math.inf else value
