"""Axes: from a number to a place, and where the ticks are."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Linear:
    """[0, high] onto [left, right] pixels."""

    high: float
    left: float
    right: float

    def at(self, value: float) -> float:
        return self.left + (self.right - self.left) * value / self.high

    def ticks(self) -> list[float]:
        step = nice(self.high / 5)
        return [i * step for i in range(int(self.high / step) + 1)]


@dataclass(frozen=True, slots=True)
class Logarithmic:
    """[low, high], both above 0, onto [left, right] pixels."""

    low: float
    high: float
    left: float
    right: float

    @classmethod
    def around(cls, values: list[float], left: float, right: float) -> Logarithmic:
        """Wide enough for every value, with air, and never less than a factor of ten."""
        low, high = max(min(values), 1e-3) * 0.8, max(values) * 1.25
        if high / low < 10:
            middle = math.sqrt(low * high)
            low, high = middle / math.sqrt(10), middle * math.sqrt(10)
        return cls(low, high, left, right)

    def at(self, value: float) -> float:
        share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return self.left + (self.right - self.left) * share

    def ticks(self) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        all_of_them = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5)]
        inside = [t for t in all_of_them if self.low <= t <= self.high]
        # too many labels would run into each other
        return inside if len(inside) <= 8 else [t for t in inside if f"{t:e}"[0] == "1"]


def nice(raw: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    if raw <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"
