"""How many requests may be sent a second time. Pure, with an injected clock."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic


class RetryBudget:
    """Over the present window and the one before it, retries are at most `ratio` × requests + `floor`.

    window: seconds. When everything fails, retries double the load just when there is least to spare; a budget ends that,
    while an engine that dies among several costs far less than it. The floor lets a quiet gateway retry at all.
    """

    __slots__ = (
        "_clock",
        "_floor",
        "_ratio",
        "_requests",
        "_requests_before",
        "_retries",
        "_retries_before",
        "_since",
        "_window",
    )

    def __init__(
        self,
        ratio: float = 0.2,
        floor: int = 10,
        window: float = 10.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._ratio = ratio
        self._floor = floor
        self._window = window
        self._clock = clock
        self._since = clock()
        self._requests = self._requests_before = 0  # in this window, in the one before
        self._retries = self._retries_before = 0

    def request(self) -> None:
        """A client's request has begun."""
        if self._clock() - self._since >= self._window:
            self._turn()
        self._requests += 1

    def try_retry(self) -> bool:
        """Takes a retry from the budget, if it holds one."""
        if self._clock() - self._since >= self._window:
            self._turn()
        requests = self._requests + self._requests_before
        if self._retries + self._retries_before >= self._floor + self._ratio * requests:
            return False
        self._retries += 1
        return True

    def _turn(self) -> None:
        """Begins a window."""
        now = self._clock()
        recent = now - self._since < 2 * self._window
        self._requests_before, self._requests = self._requests if recent else 0, 0
        self._retries_before, self._retries = self._retries if recent else 0, 0
        self._since = now
