"""How far what was predicted for one replica is what it delivered."""

from __future__ import annotations

from typing import Any

SHARE = 0.05  # of the latest request in the running mean of errors
FAITH_SHARE = 0.1
MISSING = 4  # requests in a row that were to hit and did not, until something is taken to be wrong
UNCERTAIN = 0.5  # how far a match is trusted while events are missing


class Prediction:
    """Of one replica, in tokens. `error` is the running mean of predicted - delivered, None before the first request.

    `trust`: the running mean of delivered / predicted over requests for which hits were predicted, 0 to 1. `missing`: the
    last few of these delivered nothing at all.
    """

    __slots__ = ("_barren", "error", "exact", "judged", "trust", "uncertain")

    def __init__(self) -> None:
        self.error: float | None = None
        self.trust = 1.0
        self.judged = self.exact = 0  # requests, and those of them for which it was right
        self.uncertain = False
        self._barren = 0

    @property
    def missing(self) -> bool:
        return self._barren >= MISSING

    @property
    def faith(self) -> float:
        """By how much to multiply what the replica is thought to hold."""
        return self.trust * UNCERTAIN if self.uncertain else self.trust

    def forgive(self) -> None:
        """It delivers again, or another process does: what was learnt of it counts no more."""
        self.trust = 1.0
        self._barren = 0

    def judge(self, predicted: int, delivered: int) -> None:
        """One finished request."""
        self.judged += 1
        self.exact += predicted == delivered
        error = predicted - delivered
        self.error = float(error) if self.error is None else self.error + SHARE * (error - self.error)
        if delivered:
            self._barren = 0
        elif predicted:
            self._barren += 1
        if predicted:
            self.trust += FAITH_SHARE * (min(1.0, delivered / predicted) - self.trust)

    def report(self) -> dict[str, Any]:
        return {
            "requests": self.judged,
            "exact_requests": self.exact,
            "mean_error_tokens": None if self.error is None else round(self.error, 2),
            "trust": round(self.trust, 3),
            "events_uncertain": self.uncertain,
            "hits_missing": self.missing,
        }
