"""When a replica that keeps failing gets no requests, and when it is tried again. Pure, with an injected clock.

Closed: everything passes. Out: nothing passes but, after a wait, one request as a probe. A probe that succeeds closes the
breaker, one that fails doubles the wait. Whether a replica that is out may be used all the same, for want of a better
one, is the caller's to decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from time import monotonic


class Failure(StrEnum):
    """How a replica failed. What the client caused (4xx) and a busy engine (429) are no failures: they are answers."""

    CONNECT = "no connection"
    LOST = "lost connection"  # closed, reset or no HTTP before the answer was complete
    STATUS = "status 5xx"
    TIMEOUT = "time-out"


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """consecutive: failures in a row that open it. ratio: of at least `minimum` requests within `window` seconds, so many do
    too. wait: seconds until the first probe; each probe that fails doubles it, up to `longest_wait`. patience: seconds after
    which a probe that has said nothing no longer keeps off the next.
    """

    consecutive: int = 5
    ratio: float = 0.5
    minimum: int = 20
    window: float = 10.0
    wait: float = 1.0
    longest_wait: float = 10.0
    patience: float = 30.0


class Breaker:
    """One replica's. `out`: it is not closed. `succeeded` and `failed` tell whether that has changed.

    While it is out, results count only as long as a request runs that was sent all the same: those that ran before it
    opened say nothing new.
    """

    __slots__ = (
        "_bad",
        "_clock",
        "_good",
        "_limits",
        "_probe_at",
        "_row",
        "_since",
        "_until",
        "_wait",
        "out",
        "probing",
        "trips",
    )

    def __init__(self, limits: BreakerLimits | None = None, clock: Callable[[], float] = monotonic) -> None:
        self._limits = limits or BreakerLimits()
        self._clock = clock
        self.out = False
        self.trips = 0  # how often it opened since it was last closed
        self.probing = 0  # requests under way that were sent although it is out
        self._row = 0  # failures in a row
        self._good = self._bad = 0  # since `_since`, where the window of the ratio begins
        self._since = 0.0
        self._wait = self._limits.wait
        self._until = 0.0  # the end of the present wait
        self._probe_at = 0.0

    @property
    def due(self) -> bool:
        """Whether it is out and the next request may probe it."""
        return self.out and self._clock() >= self._probe_at

    def wake(self) -> None:
        """There is a sign of life: a probe is due now."""
        self._until = self._probe_at = self._clock()

    def probe(self) -> None:
        """Notes that a request is sent although it is out."""
        self.probing += 1
        self._probe_at = self._clock() + self._limits.patience

    def succeeded(self) -> bool:
        """A request was answered."""
        if not self.out:
            self._row = 0
            self._good += 1
            return False
        if not self.probing:
            return False
        self.out = False
        self.trips = self.probing = self._row = self._good = self._bad = 0
        self._wait = self._limits.wait
        return True

    def failed(self, at_once: bool = False) -> bool:
        """A request failed through the replica's fault. `at_once`: in a way that leaves no doubt, so that it opens now."""
        now = self._clock()
        if self.out:
            self._probe_failed(now)
            return False
        limits = self._limits
        if now - self._since > limits.window:  # a window begins with a failure: there is nothing to see before it
            self._since = now
            self._good = self._bad = 0
        self._row += 1
        self._bad += 1
        total = self._good + self._bad
        if not (
            at_once
            or self._row >= limits.consecutive
            or (total >= limits.minimum and self._bad >= limits.ratio * total)
        ):
            return False
        self.out = True
        self.trips = 1
        self._until = self._probe_at = now + self._wait
        return True

    def gave_up(self) -> None:
        """A request ended without a verdict: its client left."""
        if self.probing:
            self.probing -= 1
            if not self.probing:
                self._probe_at = self._until

    def _probe_failed(self, now: float) -> None:
        if not self.probing:
            return
        self.probing -= 1
        if now >= self._until:  # several may fail within one wait, where there was no better replica
            self.trips += 1
            self._wait = min(2 * self._wait, self._limits.longest_wait)
            self._until = now + self._wait
        self._probe_at = self._until
