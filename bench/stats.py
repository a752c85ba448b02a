"""The arithmetic of the benchmark: percentiles, medians with their spread, ratios, verdicts. No clocks, no processes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["pass", "fail", "INVALID"]


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """Nearest rank of values in ascending order; None of nothing."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


@dataclass(frozen=True, slots=True)
class Spread:
    """A median over rounds and what it lies between."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """None unless every round has a value: a median of the rounds that happened to work would flatter."""
        known = [v for v in values if v is not None]
        if not known or len(known) < len(values):
            return None
        return cls(statistics.median(known), min(known), max(known))

    def json(self) -> dict[str, float]:
        return {"median": round(self.median, 4), "min": round(self.low, 4), "max": round(self.high, 4)}


def cpu_us(seconds: float, operations: int) -> float | None:
    """CPU microseconds for one operation; None where none was done, or a process took its time away by dying."""
    return seconds * 1e6 / operations if operations > 0 and seconds >= 0 else None


def ratios(values: Sequence[float | None], base: Sequence[float | None]) -> list[float | None]:
    """Round by round, so that what disturbs the machine for a while disturbs both sides of a ratio."""
    return [v / b if v is not None and b else None for v, b in zip(values, base, strict=True)]


def differences(values: Sequence[float | None], base: Sequence[float | None]) -> list[float | None]:
    return [v - b if v is not None and b is not None else None for v, b in zip(values, base, strict=True)]


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure of `target` may be at most `limit` times that of `base`, in the median over rounds; or it differs from it by
    less than `tie`, which is in the figure's unit and stands for what cannot be told apart."""

    name: str
    phase: str
    limit: float
    target: str = "kvgate"
    base: str = "nginx"
    figure: str = "cpu_us"
    tie: float = 0.0

    def judge(self, values: Sequence[float | None], base: Sequence[float | None], faults: Sequence[str]) -> Judgement:
        paired = bool(values) and len(values) == len(base)
        ratio = Spread.of(ratios(values, base)) if paired else None
        difference = Spread.of(differences(values, base)) if paired else None
        if faults or ratio is None or difference is None:
            return Judgement(self, ratio, difference, "INVALID", tuple(faults) or ("no figure in every round",))
        if ratio.median <= self.limit:
            return Judgement(self, ratio, difference, "pass", ())
        if difference.median < self.tie:
            return Judgement(
                self, ratio, difference, "pass", (f"a difference under {self.tie:g} {self.unit} is a tie",)
            )
        return Judgement(self, ratio, difference, "fail", ())

    @property
    def unit(self) -> str:
        return {"us": "µs"}.get(unit := self.figure.rpartition("_")[2], unit)


@dataclass(frozen=True, slots=True)
class Judgement:
    bar: Bar
    ratio: Spread | None
    difference: Spread | None  # in the figure's unit
    verdict: Verdict
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        measured = f"{self.ratio.median:.2f} x" if self.ratio else "unknown"
        why = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        bar = self.bar
        return f"{self.verdict}: {bar.name}, {bar.phase}: {measured} {bar.base}, at most {bar.limit:g} x{why}"
