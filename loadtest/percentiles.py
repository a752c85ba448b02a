"""Percentiles that say how many samples stand behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

# below this a 99th percentile is the largest sample under another name
SAMPLES_FOR_P99 = 100


def percentile(samples: Sequence[float], percent: float) -> float:
    """Nearest rank: always a value that was measured. Raises ValueError without samples."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def median(samples: Sequence[float]) -> float:
    ordered, half = sorted(samples), len(samples) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """n, mean, p50, p90, p99, max, in the unit of the samples; all but n are null without samples.

    Under 100 samples p99 *is* the maximum, and p99_is says so.
    """
    if not samples:
        return {"n": 0, "mean": None, "p50": None, "p90": None, "p99": None, "p99_is": "unknown", "max": None}
    enough = len(samples) >= SAMPLES_FOR_P99
    return {
        "n": len(samples),
        "mean": round(math.fsum(samples) / len(samples), 3),
        "p50": round(median(samples), 3),
        "p90": round(percentile(samples, 90), 3),
        "p99": round(percentile(samples, 99) if enough else max(samples), 3),
        "p99_is": "percentile" if enough else "maximum",
        "max": round(max(samples), 3),
    }
