"""The slopes of ALiBi (Press, Smith and Lewis, 2021), also for head counts that are no power of two."""

from __future__ import annotations


def series(heads: int) -> tuple[tuple[int, float, float], ...]:
    """Runs of heads whose slopes form a geometric series: (heads of the run, first exponent of 2, step).

    The first run is as long as the largest power of two goes; the others take every second slope of the next one.
    """
    power = 1 << (heads.bit_length() - 1)
    runs = [(power, -8.0 / power, -8.0 / power)]
    if heads > power:
        runs.append((heads - power, -4.0 / power, -8.0 / power))
    return tuple(runs)


def slopes(heads: int) -> list[float]:
    """One slope a head."""
    return [2.0 ** (first + step * place) for count, first, step in series(heads) for place in range(count)]
