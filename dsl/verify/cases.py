"""Which batches are tried: lengths at the edges of blocks and tiles, and traps that share one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dsl.spec import Case, Spec, Workload

Scale = Literal["small", "large"]
"""`small` batches take seconds in the interpreter; `large` ones and whole workloads are for a GPU."""


@dataclass(frozen=True, slots=True)
class Trend:
    """How a sequence's scores run along its keys, beneath noise of about one nat.

    `ramp`: they rise steadily by `nats`, or fall where that is negative. `first`, `last`: a few keys at that end stand
    `nats` above the others. `level`: all scores stand near `nats`. `zero`: the queries are zero.
    One query row of `every` follows it, in the middle of them; to the other rows all keys are level.
    """

    shape: Literal["ramp", "first", "last", "level", "zero"]
    nats: float = 0.0
    every: int = 1

    def __str__(self) -> str:
        words = {
            "ramp": f"scores {'rise' if self.nats > 0 else 'fall'} by {abs(self.nats):g} nats",
            "first": f"first keys {self.nats:g} nats above the others",
            "last": f"last keys {self.nats:g} nats above the others",
            "level": f"scores near {self.nats:g}",
            "zero": "queries of zero",
        }[self.shape]
        return words if self.every == 1 else f"{words} for one row of {self.every}"


@dataclass(frozen=True, slots=True)
class Adversity:
    """What is wrong with a batch apart from its lengths.

    `poison`: NaN in every slot that no query may see, in unused pages and in rows of no sequence; garbage in table
    entries past the length; permuted pages, one of them shared; lengths below 0 and past the table.
    `views`: tensors are slices of wider buffers (`aligned` to 16 bytes, or `odd`), and `out` is the caller's.
    `logits`: the typical size of a score. `room`: how many keys a table's row or a dense tensor can hold at least.
    `trends`: KV heads and sequences take them in turn; `trend` tells which.
    """

    poison: bool = False
    views: Literal["none", "aligned", "odd"] = "none"
    logits: float | None = None
    room: int = 0
    trends: tuple[Trend, ...] = ()

    def trend(self, sequence: int, kv_head: int) -> Trend:
        """The trend of one KV head of one sequence."""
        return self.trends[(sequence + kv_head) % len(self.trends)]

    def __str__(self) -> str:
        parts = {
            "poison": self.poison,
            f"{self.views} views": self.views != "none",
            f"logits near {self.logits}": self.logits is not None,
            f"room for {self.room} keys": self.room > 0,
            str(self.trends[0]) if len(self.trends) == 1 else f"{len(self.trends)} trends of scores": self.trends,
        }
        return ", ".join(words for words, holds in parts.items() if holds) or "none"


PLAIN = Adversity()


@dataclass(frozen=True, slots=True)
class Trial:
    """One batch of one block. `dispatched` batches also go through the dispatches of the block, which only choose."""

    name: str
    case: Case
    adversity: Adversity
    dispatched: bool = True


def trials(spec: Spec, workloads: Sequence[Workload], scale: Scale) -> tuple[Trial, ...]:
    """The batches that a block is verified on, simplest first."""
    edges, few = _lengths(spec, scale)
    adverse = [
        Trial("lengths", edges, Adversity(poison=True, views="aligned")),
        Trial("logits", few, Adversity(views="odd", logits=150.0), dispatched=False),
        *_trend_trials(spec, scale),
    ]
    if spec.kv == "paged":
        adverse += _split_trials(scale)
    return (*_workload_trials(spec, workloads, scale), *adverse)


def _lengths(spec: Spec, scale: Scale) -> tuple[Case, Case]:
    """A batch with every edge, and a short one: (query length, KV length) of each sequence."""
    block = spec.block or 16
    long = max(133, 2 * block + 3) if scale == "small" else 4099
    around = sorted({0, 1, block - 1, block, block + 1, long, _round_up(long + 1, block)})
    if spec.family == "decode":
        return _case([(1, length) for length in around]), _case([(1, block + 3), (1, long)])
    if spec.family == "dense":
        queries = 33 if scale == "small" else 300
        return (
            _case([(queries, length) for length in (0, 1, queries, 70, long)]),
            _case([(queries, queries)] * 2),
        )
    queries = 67 if scale == "small" else 1030
    more = [(0, 7), (1, 1), (5, 3), (3, 0), (15, 40), (1, long), (queries, long), (queries, queries), (0, 0)]
    edges = more if spec.family == "prefill" else [*more, *((2, length) for length in around[1:])]
    return _case(edges), _case([(9, block + 3), (queries, queries + 3)])


_FEW_TRENDS = (
    Trend("ramp", 100),
    Trend("last", 100, every=5),
    Trend("first", 60),
    Trend("ramp", -100),
    Trend("zero"),
)
_EDGE_TRENDS = (
    Trend("ramp", 400),
    Trend("ramp", 400, every=97),
    Trend("last", 12.5),
    Trend("last", 20),
    Trend("last", 46),
    Trend("last", 100),
)
"""Around what an offset fixed by the first keys can bear: 11 nats in fp16, 44 in bf16; a row of 97 leaves tiles out."""
_ALONE_TRENDS = (Trend("ramp", 800), Trend("last", 46), Trend("first", 60))
"""For one sequence whose keys are cut into parts: the maximum rises in every part, in the last one, in none."""


def _trend_trials(spec: Spec, scale: Scale) -> list[Trial]:
    """Scores that rise and fall along the keys, each trend on every KV head, or in a small batch on one at least."""
    # Beside a sink, weights of such scores are smaller than a float can be.
    low = () if spec.sink is not None else (Trend("level", -200),)
    queries = 1 if spec.family == "decode" else 33 if scale == "small" else 300
    if scale == "small":
        trends = (*_FEW_TRENDS, *low)
        seqs = max(1, len(trends) - spec.kv_heads + 1)
        return [Trial("trends", _case([(queries, 140)] * seqs), Adversity(trends=trends), dispatched=False)]
    trends = (*_FEW_TRENDS, *low, *_EDGE_TRENDS)
    every = Trial("trends", _case([(queries, 2100)] * len(trends)), Adversity(trends=trends), dispatched=False)
    alone = _case([(queries, 8192)])
    return [
        every,
        *(Trial("one trend", alone, Adversity(trends=(trend,)), dispatched=False) for trend in _ALONE_TRENDS),
    ]


def _split_trials(scale: Scale) -> list[Trial]:
    """Few sequences, where a plan would cut the keys into parts: one that fills its table, one its first quarter."""
    uneven = [1, 0, 700] if scale == "small" else [1, 0, 8192, 50_000]
    quarter = 1500 if scale == "small" else 3000
    return [
        Trial("splits", _case([(1, length) for length in uneven]), Adversity(poison=True), dispatched=False),
        Trial("many splits", _case([(1, quarter)]), Adversity(poison=True, room=4 * quarter + 400), dispatched=False),
    ]


def _workload_trials(spec: Spec, workloads: Sequence[Workload], scale: Scale) -> list[Trial]:
    cases = [case for workload in workloads if workload.block == spec.name for case in workload.cases]
    if scale == "small":
        shrunk = dict.fromkeys(_shrink(case) for case in cases)
        cases = list(shrunk)[:1] or [_lengths(spec, scale)[1]]
    return [Trial(f"workload {place}", case, PLAIN) for place, case in enumerate(cases)]


def _shrink(case: Case) -> Case:
    pairs = list(zip(case.q_lens, case.kv_lens, strict=True))[:2]
    return _case([(min(q_len, 70), min(kv_len, 130)) for q_len, kv_len in pairs])


def _case(pairs: Sequence[tuple[int, int]]) -> Case:
    return Case(tuple(q_len for q_len, _ in pairs), tuple(kv_len for _, kv_len in pairs))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
