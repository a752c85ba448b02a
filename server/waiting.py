"""Who runs now, who waits, and who is next: the bounded queue in front of the engines. Pure: no I/O, no tasks, one thread.

A request that `enter`s holds a slot or waits. Slots go, as they come free, to the most urgent priority; within it to the
tenant that is furthest behind its weighted share; within a tenant to the request that came first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from time import monotonic
from typing import Protocol

from kvgate.errors import Problem
from server.fairness import Band, Lane

PASSED_OVER = 8  # of so many admissions while a less urgent priority waits, one goes to it


class Waiter(Protocol):
    """A request that waits. Exactly one of these is called, once, unless it `leave`s before. Neither may raise."""

    def admitted(self) -> None:
        """It runs now, and holds a slot."""

    def refused(self, problem: Problem) -> None:
        """It will not run; it holds no slot."""


@dataclass(slots=True, eq=False)
class _Place:
    """Where a waiter stands."""

    band: Band[Waiter]
    lane: Lane[Waiter]
    since: float


class AdmissionQueue:
    """See the module.

    capacity: slots in all; asked each time, and may change or be 0. When it rises, call `fill`.
    max_waiting: requests that may wait. max_waiting_seconds: how long each may; `expire` ends them.
    clock: seconds, monotonic.

    A priority is any integer, the smaller the more urgent (as vLLM's). It is strict, but for one admission in PASSED_OVER,
    which goes to the less urgent priority whose oldest request came first: so none starves. When the queue is full, a
    tenant that takes up less of it, by weight, than another does takes the place of the other's newest request: so one
    tenant cannot keep others out. Fairness counts requests.
    """

    def __init__(
        self,
        capacity: Callable[[], int],
        max_waiting: int,
        max_waiting_seconds: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.running = 0  # slots taken
        self._capacity = capacity
        self._max_waiting = max_waiting
        self._max_seconds = max_waiting_seconds
        self._clock = clock
        self._places: OrderedDict[Waiter, _Place] = OrderedDict()  # in order of arrival, and so of their deadlines
        self._bands: dict[int, Band[Waiter]] = {}
        self._passed_over = 0
        self._last_wait = 0.0  # seconds that the last one admitted had waited: what a new one has to expect
        self._filling = False

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._places)

    def oldest_age(self) -> float:
        """Seconds that the oldest waiting request has waited; 0 if none waits."""
        for place in self._places.values():
            return self._clock() - place.since
        return 0.0

    def enter(self, waiter: Waiter, tenant: str, weight: float = 1.0, priority: int = 0) -> bool:
        """True: it runs now and holds a slot (`waiter` is not called). False: it waits, and `waiter` will be called.

        Raises Problem 503 with the reason `queue_full`. A request that no replica could take, however long it waits, is
        the caller's to refuse before.
        """
        if self._places:
            self.fill()
        if not self._places and self.running < self._capacity():
            self.running += 1
            return True
        put_out = self._make_room(tenant, weight) if len(self._places) >= self._max_waiting else None
        band = self._bands.get(priority)
        if band is None:
            band = self._bands[priority] = Band(priority)
        now = self._clock()
        self._places[waiter] = _Place(band, band.join(waiter, tenant, weight, now), now)
        if put_out is not None:
            put_out.refused(self._full())
        return False

    def leave(self, waiter: Waiter) -> bool:
        """Takes out a waiter whose client is gone: it is not called any more. False if it does not wait (it may hold a slot)."""
        place = self._places.pop(waiter, None)
        if place is None:
            return False
        place.lane.leave(waiter)
        self._drop_if_empty(place.band)
        return True

    def release(self) -> None:
        """Gives a slot back. Called once for each slot that was taken."""
        assert self.running > 0, "a slot was given back twice"
        self.running -= 1
        if self._places:
            self.fill()

    def fill(self) -> None:
        """Gives free slots to waiters. Called by `release`, and where the capacity has risen."""
        if self._filling:  # by a waiter that gave its slot back at once: the loop below goes on, without recursion
            return
        self._filling = True
        try:
            while self._places and self.running < self._capacity():
                waiter = self._next()
                self.running += 1
                waiter.admitted()
        finally:
            self._filling = False

    def expire(self, now: float | None = None) -> None:
        """Refuses those whose time is up, with the reason `queue_timeout`; call it often enough for the time-out's sake."""
        last = (self._clock() if now is None else now) - self._max_seconds
        while self._places:
            waiter, place = next(iter(self._places.items()))
            if place.since > last:
                break
            self.leave(waiter)
            waiter.refused(self._saturated("queue_timeout", f"No engine came free within {self._max_seconds:g} s."))
        self.fill()

    def _next(self) -> Waiter:
        band = self._next_band()
        waiter = band.next()
        place = self._places.pop(waiter)
        self._last_wait = self._clock() - place.since
        self._drop_if_empty(band)
        return waiter

    def _next_band(self) -> Band[Waiter]:
        first = min(self._bands)
        if len(self._bands) == 1:
            self._passed_over = 0
        elif self._passed_over + 1 < PASSED_OVER:
            self._passed_over += 1
        else:
            self._passed_over = 0
            return min((b for p, b in self._bands.items() if p != first), key=Band.oldest)
        return self._bands[first]

    def _drop_if_empty(self, band: Band[Waiter]) -> None:
        if not band.busy:
            del self._bands[band.priority]

    def _make_room(self, tenant: str, weight: float) -> Waiter:
        """Takes out the newest request of the tenant that takes up most, if that is more than `tenant` would; raises Problem."""
        taken: dict[str, float] = {}
        for band in self._bands.values():
            for lane in band.busy:
                taken[lane.tenant] = taken.get(lane.tenant, 0.0) + len(lane.waiting) / lane.weight
        most = max(taken, key=taken.__getitem__, default=tenant)
        if taken.get(tenant, 0.0) + 1 / weight >= taken.get(most, 0.0):
            raise self._full()
        least_urgent = max((b for b in self._bands.values() if b.holds(most)), key=lambda b: b.priority)
        waiter = least_urgent.newest(most)
        self.leave(waiter)
        return waiter

    def _full(self) -> Problem:
        return self._saturated("queue_full", "Too many requests wait already.")

    def _saturated(self, reason: str, what: str) -> Problem:
        wait = max(1, ceil(min(self._last_wait, self._max_seconds)))
        return Problem(503, "saturated", f"{what} Try again later.", retry_after=wait, reason=reason)
