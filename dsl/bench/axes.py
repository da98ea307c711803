"""The axes of a panel: where a number stands in pixels, and which numbers are written beside an axis."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MOST_TICKS = 7


@dataclass(frozen=True, slots=True)
class Scale:
    """From numbers to pixels: a log axis to the right and a linear one upwards."""

    left: float
    bottom: float
    width: float
    height: float
    least: float
    most: float
    highest: float

    def x(self, size: float) -> float:
        return self.left + self.width * math.log(size / self.least) / math.log(self.most / self.least)

    def y(self, rate: float) -> float:
        return self.bottom - self.height * rate / self.highest


def log_ticks(least: float, most: float) -> list[int]:
    """Whole powers of ten within the axis, with the steps between them for which there is room."""
    decades = range(max(0, math.floor(math.log10(least))), math.ceil(math.log10(most)) + 1)
    ticks: list[int] = []
    for tenths in ((10, 15, 20, 30, 50, 70), (10, 20, 50), (10, 30), (10,)):
        found = {step * 10**decade // 10 for decade in decades for step in tenths}
        ticks = sorted(tick for tick in found if least <= tick <= most)
        if len(ticks) <= _MOST_TICKS:
            break
    return ticks


def linear_ticks(most: float) -> list[float]:
    """About five steps of 1, 2 or 5 times a power of ten, from 0 on."""
    power = 10.0 ** math.floor(math.log10(most / 5))
    step = next(factor * power for factor in (1, 2, 5, 10) if most / (factor * power) <= 5.5)
    return [step * number for number in range(int(most / step) + 1)]


def short(number: int) -> str:
    """1500 as `1.5k`."""
    for size, suffix in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:g}{suffix}"
    return str(number)


def pixels(value: float) -> str:
    """A coordinate as it is printed."""
    return f"{value:.1f}"
