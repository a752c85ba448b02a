"""Whether a numbered batch is the next one, seen before, past a gap, or from an engine that began anew. No I/O."""

from __future__ import annotations

from array import array
from enum import Enum, auto

RING = 16_384  # batches whose digests are kept; more than a subscriber's queue can hold


class Verdict(Enum):
    NEXT = auto()
    SEEN = auto()  # this very batch was taken before
    OLD = auto()  # before any that is remembered
    GAP = auto()
    RESTARTED = auto()  # the number was another batch's: numbers begin at 0 in each process of an engine


class Sequence:
    """The batches taken so far. `last`: number of the last one; -1 when none was published yet; None when nothing is known.

    A batch carries the time at which it was made, so two processes never publish the same one.
    """

    __slots__ = ("_digests", "_first", "last")

    def __init__(self) -> None:
        self.last: int | None = None
        self._first = 0  # digests are known from here on
        self._digests = array("q", bytes(8 * RING))

    def verdict(self, number: int, payload: bytes) -> Verdict:
        last = self.last
        if last is None or number > last:
            return Verdict.NEXT if number == (0 if last is None else last + 1) else Verdict.GAP
        if number < self._first or number <= last - RING:
            return Verdict.OLD
        return Verdict.SEEN if self._digests[number % RING] == hash(payload) else Verdict.RESTARTED

    def take(self, number: int, payload: bytes) -> None:
        """This batch counts as the last one now, whatever is missing before it."""
        if self.last is None or number != self.last + 1:
            self._first = number
        self.last = number
        self._digests[number % RING] = hash(payload)

    def begin(self) -> None:
        """The publisher has published nothing yet."""
        self.last, self._first = -1, 0

    def reset(self) -> None:
        """Nothing is known."""
        self.last, self._first = None, 0
