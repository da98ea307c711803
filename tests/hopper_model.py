"""A model of how the warps of `templates/kernels/prefill_hopper.py.jinja` wait for each other.

No GPU, no numbers: memory holds tags, agents are generators that yield where warps may be overtaken, and a schedule is
random. A wait that never ends, a barrier that overflows, or a tag that is not the expected one is an error.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

TURN, K_FREE, V_FREE, FAILURES = 5, 8, 11, 14
BATCH = 4
PATIENCE = 20_000
Steps = Iterator[None]


@dataclass(frozen=True)
class Tile:
    """One tile of queries: blocks of keys, and warpgroups that have rows; `fails` names those whose guess fails."""

    number: int
    blocks: int
    height: int
    fails: frozenset[int] = frozenset()


@dataclass(eq=False)
class TransactionBarrier:
    """An mbarrier: a phase ends when all arrivals and all announced copies are there."""

    count: int
    missing: int = field(init=False)
    copies: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.missing = self.count

    def arrive(self, count: int = 1) -> None:
        self.missing -= count
        assert self.missing >= 0, "more arrivals than a phase has"
        self._turn()

    def expect(self) -> None:
        self.copies += 1
        self.arrive()

    def complete(self) -> None:
        self.copies -= 1
        self._turn()

    def _turn(self) -> None:
        if self.missing == 0 and self.copies == 0:
            self.phase ^= 1
            self.missing = self.count

    def wait(self, parity: int) -> Steps:
        while self.phase == parity:
            yield


@dataclass
class NamedBarrier:
    """One of the sixteen hardware barriers: it opens for all when enough threads have come."""

    threads: int = 0
    opened: int = 0

    def arrive(self, threads: int, enough: int) -> None:
        self.threads += threads
        assert self.threads <= enough, "more threads than the barrier counts"
        if self.threads == enough:
            self.threads = 0
            self.opened += 1

    def sync(self, threads: int, enough: int) -> Steps:
        opened = self.opened
        self.arrive(threads, enough)
        while self.opened == opened:
            yield


class Program:
    """One program: a warp that loads, and warpgroups that attend."""

    def __init__(self, tiles: list[Tile | None], consumers: int, stages: int, q_stages: int, seed: int) -> None:
        self.tiles, self.consumers, self.stages, self.q_stages = tiles, consumers, stages, q_stages
        self.random = random.Random(seed)
        self.threads = consumers * 128 + 32
        self.named = [NamedBarrier() for _ in range(16)]
        self.q_ready = [TransactionBarrier(2) for _ in range(q_stages)]
        self.q_free = [TransactionBarrier(consumers) for _ in range(q_stages)]
        self.k_ready = [TransactionBarrier(1) for _ in range(stages)]
        self.v_ready = [TransactionBarrier(1) for _ in range(stages)]
        self.batch: list[Tile | None] = []
        self.told = [0] * q_stages
        self.queries: dict[int, object] = {}
        self.keys: dict[int, object] = {}
        self.values: dict[int, object] = {}
        self.failures = [0] * consumers
        self.copies: list[tuple[dict[int, object], int, object, TransactionBarrier]] = []
        self.attended: list[list[tuple[int, bool]]] = [[] for _ in range(consumers)]

    def run(self) -> None:
        """Run to the end under a random schedule."""
        agents = [self._load(), *(self._attend(consumer) for consumer in range(self.consumers))]
        idle = 0
        while agents:
            idle += 1
            assert idle < PATIENCE, f"{len(agents)} agents wait for ever"
            if self.copies and self.random.random() < 0.4:
                memory, stage, tag, barrier = self.copies.pop(self.random.randrange(len(self.copies)))
                memory[stage] = tag
                barrier.complete()
                idle = 0
                continue
            agent = self.random.choice(agents)
            if next(agent, "done") == "done":
                agents.remove(agent)
                idle = 0
        assert all(barrier.threads == 0 for barrier in self.named), "a barrier is left half full"

    def _copy(self, memory: dict[int, object], stage: int, tag: object, barrier: TransactionBarrier) -> None:
        barrier.expect()
        self.copies.append((memory, stage, tag, barrier))

    # The warp that loads.

    def _load(self) -> Steps:
        uses, messages = yield from self._load_tiles(-1, 0, 0)
        yield from self.named[FAILURES].sync(32, self.threads)
        wanted = self._all_failures()
        if wanted:
            uses, messages = yield from self._load_tiles(wanted, uses, messages)
        for use in range(max(uses - self.stages, 0), uses):
            yield from self.named[K_FREE + use % self.stages].sync(32, self.threads)
            yield from self.named[V_FREE + use % self.stages].sync(32, self.threads)

    def _load_tiles(self, wanted: int, uses: int, messages: int):
        number = 0
        for base in range(0, len(self.tiles), BATCH):
            for message in range(max(messages - self.q_stages, 0), messages):
                yield from self.q_free[message % self.q_stages].wait(message // self.q_stages & 1)
            self.batch = self.tiles[base : base + BATCH]
            for lane, tile in enumerate(self.batch):
                if tile is None:
                    continue
                if wanted >> number % 32 & 1:
                    stage = yield from self._free_message(messages)
                    self.told[stage] = lane
                    self.q_ready[stage].arrive()
                    self._copy(self.queries, stage, tile, self.q_ready[stage])
                    messages += 1
                    yield
                    yield from self._load_blocks(tile, uses)
                    uses += tile.blocks
                number += 1
        stage = yield from self._free_message(messages)
        self.told[stage] = -1
        self.q_ready[stage].arrive(2)
        return uses, messages + 1

    def _free_message(self, messages: int):
        stage = messages % self.q_stages
        if messages >= self.q_stages:
            yield from self.q_free[stage].wait(messages // self.q_stages - 1 & 1)
        return stage

    def _load_blocks(self, tile: Tile, uses: int) -> Steps:
        for use in range(uses, uses + tile.blocks):
            stage = use % self.stages
            for number, memory, ready in ((K_FREE, self.keys, self.k_ready), (V_FREE, self.values, self.v_ready)):
                if use >= self.stages:
                    yield from self.named[number + stage].sync(32, self.threads)
                self._copy(memory, stage, (tile, use - uses), ready[stage])
                yield

    # The warpgroups.

    def _all_failures(self) -> int:
        result = 0
        for bits in self.failures:
            result |= bits
        return result

    def _attend(self, consumer: int) -> Steps:
        if consumer == self.consumers - 1:
            self.named[TURN].arrive(128, 256)
        uses, messages, self.failures[consumer] = yield from self._attend_tiles(consumer, 0, 0, False)
        yield from self.named[FAILURES].sync(128, self.threads)
        if self._all_failures():
            yield from self._attend_tiles(consumer, uses, messages, True)
        if consumer == 0:
            yield from self.named[TURN].sync(128, 256)

    def _attend_tiles(self, consumer: int, uses: int, messages: int, running_max: bool):
        failed = 0
        stage = messages % self.q_stages
        yield from self.q_ready[stage].wait(messages // self.q_stages & 1)
        lane = self.told[stage]
        while lane >= 0:
            tile = self.batch[lane]
            assert tile is not None
            attend = self._attend_blocks if tile.blocks > 0 and consumer < tile.height else self._follow
            yield from attend(consumer, tile, stage, uses)
            assert self.batch[lane] is tile, "the batch was written while it was read"
            self.q_free[stage].arrive()
            self.attended[consumer].append((tile.number, running_max))
            if not running_max and consumer in tile.fails:
                failed |= 1 << messages % 32
            uses += tile.blocks
            messages += 1
            stage = messages % self.q_stages
            yield from self.q_ready[stage].wait(messages // self.q_stages & 1)
            lane = self.told[stage]
        self.q_free[stage].arrive()
        return uses, messages + 1, failed

    def _attend_blocks(self, consumer: int, tile: Tile, q_stage: int, uses: int) -> Steps:
        stages, last = self.stages, uses + tile.blocks - 1
        yield from self.k_ready[uses % stages].wait(uses // stages & 1)
        assert self.keys[uses % stages] == (tile, 0) and self.queries[q_stage] is tile
        yield
        self.named[K_FREE + uses % stages].arrive(128, self.threads)
        for turn in range(uses + 1, last + 1):
            before = turn - 1
            yield from self.k_ready[turn % stages].wait(turn // stages & 1)
            yield from self.named[TURN + consumer].sync(128, 256)
            yield from self.v_ready[before % stages].wait(before // stages & 1)
            self.named[TURN + (consumer + 1) % self.consumers].arrive(128, 256)
            yield
            assert self.keys[turn % stages] == (tile, turn - uses) and self.queries[q_stage] is tile
            self.named[K_FREE + turn % stages].arrive(128, self.threads)
            yield
            assert self.values[before % stages] == (tile, before - uses)
            self.named[V_FREE + before % stages].arrive(128, self.threads)
        yield from self.v_ready[last % stages].wait(last // stages & 1)
        yield
        assert self.values[last % stages] == (tile, last - uses)
        self.named[V_FREE + last % stages].arrive(128, self.threads)

    def _follow(self, consumer: int, tile: Tile, q_stage: int, uses: int) -> Steps:
        for turn in range(uses, uses + tile.blocks):
            stage = turn % self.stages
            yield from self.k_ready[stage].wait(turn // self.stages & 1)
            if turn > uses:
                yield from self.named[TURN + consumer].sync(128, 256)
                self.named[TURN + (consumer + 1) % self.consumers].arrive(128, 256)
            self.named[K_FREE + stage].arrive(128, self.threads)
            yield from self.v_ready[stage].wait(turn // self.stages & 1)
            self.named[V_FREE + stage].arrive(128, self.threads)
