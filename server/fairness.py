"""Weighted fair order among tenants: worst-case fair weighted fair queueing (WF2Q+) over requests of equal size.

Over any backlog, a tenant is never a whole request ahead of its weighted share, nor behind it. Each lane carries the
virtual time at which its next request may start; among those that may, the one that would finish first is next.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
ROUNDING = 1e-9  # virtual times are sums of fractions


@dataclass(slots=True, eq=False)
class Lane(Generic[T]):
    """The requests of one tenant at one priority, in order of arrival, each with the time when it came."""

    tenant: str
    weight: float
    start: float  # virtual time at which its next request may start
    waiting: OrderedDict[T, float] = field(default_factory=OrderedDict)

    @property
    def finish(self) -> float:
        return self.start + 1.0 / self.weight

    def leave(self, item: T) -> None:
        del self.waiting[item]


class Band(Generic[T]):
    """The lanes of one priority. An empty one is kept while its tenant has had more than its share."""

    __slots__ = ("_lanes", "_now", "priority")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self._lanes: dict[str, Lane[T]] = {}
        self._now = 0.0  # virtual time: grows by one request divided by the weights that compete for it

    @property
    def busy(self) -> list[Lane[T]]:
        """The lanes in which somebody waits."""
        return [lane for lane in self._lanes.values() if lane.waiting]

    def holds(self, tenant: str) -> bool:
        lane = self._lanes.get(tenant)
        return lane is not None and bool(lane.waiting)

    def join(self, item: T, tenant: str, weight: float, now: float) -> Lane[T]:
        """Puts `item` behind the others of its tenant. `weight` is above 0, and the newest one counts; `now` in seconds."""
        assert weight > 0, "a weight is above 0"
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._lanes[tenant] = Lane(tenant, weight, self._now)
        lane.weight = weight
        lane.waiting[item] = now
        return lane

    def oldest(self) -> float:
        """When the oldest request came, in seconds."""
        return min(next(iter(lane.waiting.values())) for lane in self.busy)

    def newest(self, tenant: str) -> T:
        return next(reversed(self._lanes[tenant].waiting))

    def next(self) -> T:
        """Takes out the request whose turn it is."""
        busy = self.busy
        if len(busy) < len(
            self._lanes
        ):  # what a tenant does not use while it is away is gone; what it had too much is not
            past = [t for t, lane in self._lanes.items() if not lane.waiting and lane.start <= self._now]
            for tenant in past:
                del self._lanes[tenant]
        self._now = max(self._now, min(lane.start for lane in busy))
        may_start = [lane for lane in busy if lane.start <= self._now + ROUNDING]
        lane = min(may_start, key=lambda lane: lane.finish)
        self._now += 1.0 / sum(other.weight for other in busy)
        lane.start = lane.finish
        return lane.waiting.popitem(last=False)[0]
