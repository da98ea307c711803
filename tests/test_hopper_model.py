"""The model of the Hopper kernel's waiting: it ends, under every schedule tried, with every tile attended to once."""

from __future__ import annotations

import random

import pytest

from tests.hopper_model import Program, Tile, TransactionBarrier


def tiles(source: random.Random, consumers: int) -> list[Tile | None]:
    share = source.choice([0.0, 0.1, 0.5, 1.0])
    result: list[Tile | None] = []
    for number in range(source.randrange(1, 70 if source.random() < 0.2 else 12)):
        height = source.randrange(1, consumers + 1)
        fails = frozenset(consumer for consumer in range(height) if source.random() < share)
        result.append(None if source.random() < 0.2 else Tile(number, source.randrange(6), height, fails))
    return result


@pytest.mark.parametrize("part", range(4))
def test_it_ends_and_attends_to_every_tile(part: int):
    for seed in range(part * 150, part * 150 + 150):
        source = random.Random(seed)
        consumers, stages, q_stages = source.choice([2, 3]), source.choice([2, 3]), source.choice([1, 2])
        work = tiles(source, consumers)
        program = Program(work, consumers, stages, q_stages, seed)
        program.run()
        present = [tile for tile in work if tile is not None]
        # A bit stands for every 32nd tile.
        again = [tile for place, tile in enumerate(present) if any(other.fails for other in present[place % 32 :: 32])]
        expected = [(tile.number, False) for tile in present] + [(tile.number, True) for tile in again]
        assert program.attended == [expected] * consumers


def test_a_message_that_is_not_given_back_is_found(monkeypatch: pytest.MonkeyPatch):
    """The last message of the first pass was once kept, and the second pass waited for it."""
    arrive = TransactionBarrier.arrive
    program = Program([Tile(0, 2, 2, frozenset({0}))], consumers=2, stages=2, q_stages=1, seed=0)
    given_back = iter([True] * 2)

    def kept(barrier: TransactionBarrier, count: int = 1) -> None:
        if barrier not in program.q_free or next(given_back, False):
            arrive(barrier, count)

    monkeypatch.setattr(TransactionBarrier, "arrive", kept)
    with pytest.raises(AssertionError, match="wait for ever"):
        program.run()
