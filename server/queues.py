"""A queue for each pool of engines: one model's crowd does not keep another model's engines idle."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from server.waiting import AdmissionQueue


class AdmissionQueues:
    """The admission queues of all pools, each made when it is first asked for. Arguments as AdmissionQueue's.

    capacity: slots of a pool; a replica that belongs to two pools counts in both. max_waiting holds for each pool. A pool is
    named by one of its models (ReplicaSet.pool_of), so their number is bounded by the models served.
    """

    def __init__(
        self,
        capacity: Callable[[str], int],
        max_waiting: int,
        max_waiting_seconds: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._capacity = capacity
        self._max_waiting = max_waiting
        self._max_seconds = max_waiting_seconds
        self._clock = clock
        self._queues: dict[str, AdmissionQueue] = {}

    def of(self, pool: str) -> AdmissionQueue:
        """The queue of a pool. Whoever enters it leaves and releases at the same one, whatever becomes of the pool."""
        queue = self._queues.get(pool)
        if queue is None:
            queue = self._queues[pool] = AdmissionQueue(
                lambda: self._capacity(pool), self._max_waiting, self._max_seconds, self._clock
            )
        return queue

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(queue.waiting for queue in self._queues.values())

    @property
    def running(self) -> int:
        """Slots taken."""
        return sum(queue.running for queue in self._queues.values())

    def oldest_age(self) -> float:
        """Seconds that the oldest waiting request has waited; 0 if none waits."""
        return max((queue.oldest_age() for queue in self._queues.values()), default=0.0)

    def fill(self) -> None:
        """Gives free slots to waiters: where capacity has risen."""
        for queue in list(self._queues.values()):
            queue.fill()

    def expire(self, now: float | None = None) -> None:
        """Refuses those whose time is up, and drops the queues of pools that are gone."""
        for pool, queue in list(self._queues.items()):
            queue.expire(now)
            if not queue.waiting and not queue.running and not self._capacity(pool):
                del self._queues[pool]
