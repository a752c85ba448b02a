"""Open loop: was the planned load really offered, and could the engine take it? Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from loadtest.outcome import Outcome


def offered_share(outcomes: Sequence[Outcome]) -> float:
    """Achieved / planned rate: the planned span of sends over the real one. 1 with fewer than two requests."""
    if len(outcomes) < 2:
        return 1.0
    planned = max(o.planned_ns for o in outcomes) - min(o.planned_ns for o in outcomes)
    sent = max(o.sent_ns for o in outcomes) - min(o.planned_ns for o in outcomes)
    return min(1.0, planned / sent) if sent > 0 else 1.0


def in_flight_at_arrivals(outcomes: Sequence[Outcome]) -> list[int]:
    """For each arrival in order: how many earlier ones had not ended."""
    ordered = sorted(outcomes, key=lambda o: o.planned_ns)
    return [sum(e.end_ns > o.planned_ns for e in ordered[:i]) for i, o in enumerate(ordered)]


def growing(outcomes: Sequence[Outcome]) -> bool:
    """Whether the queue grows: the last third of the arrivals meets clearly more in flight than the middle third.

    The first third is the ramp. A queue that grows evenly has a ratio of 1.67 between these thirds; 1.3 and two
    requests more leave room for the noise of random arrivals.
    """
    flights = in_flight_at_arrivals(outcomes)
    third = len(flights) // 3
    if third < 2:
        return False
    return fmean(flights[-third:]) > 1.3 * fmean(flights[third : 2 * third]) + 2
