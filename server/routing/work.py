"""The work that a replica was given and has not done yet, as far as this gateway knows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from time import monotonic

_order = count()
NEVER = float("inf")
AFTER = 5.0  # times the time that computing takes: its price for requests that come after


class Job:
    """One attempt at one replica. `tokens` are to be computed before its first token; `kv` is what it holds until its end."""

    __slots__ = ("kv", "tokens")

    def __init__(self, tokens: int, kv: int) -> None:
        self.tokens = tokens
        self.kv = kv


class Work:
    """Of one replica, in tokens. A job's uncached tokens count in `queued` until its first token, or, where that cannot be
    seen because the answer is no stream, until it should have come; its KV memory counts in `kv` until it ends.

    `next_due`: monotonic seconds from when on `expire` has something to do. `front`: tokens of the oldest prompt in
    `queued`; it is being computed `since` then, in monotonic seconds. The policy notes here what it sent: `lately`, in seconds
    of work, and with what `weight` a miss counts for that.
    """

    __slots__ = ("_clock", "_due", "_line", "front", "kv", "lately", "next_due", "queued", "since", "weight")

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._due: list[tuple[float, int, Job]] = []
        self._line: deque[Job] = deque()  # by age; computed ones behind the first are still in it
        self.front = 0
        self.since = 0.0
        self.lately = 0.0
        self.weight = 1.0 + AFTER
        self.next_due = NEVER
        self.queued = 0
        self.kv = 0

    def begin(self, tokens: int, kv: int, due: float) -> Job:
        """A request was sent. `due`: when its prompt counts as computed in any case."""
        job = Job(tokens, kv)
        self.queued += tokens
        self.kv += kv
        if tokens:
            if not self._line:
                self.front, self.since = tokens, self._clock()
            self._line.append(job)
            heappush(self._due, (due, next(_order), job))
            self.next_due = self._due[0][0]
        return job

    def expire(self, now: float) -> None:
        """Take what is due for computed."""
        due = self._due
        while due and (due[0][0] <= now or not due[0][2].tokens):
            self._compute(heappop(due)[2], now)
        self.next_due = due[0][0] if due else NEVER

    def computed(self, job: Job) -> None:
        """Its first token came. May be called again."""
        if job.tokens:
            self._compute(job, self._clock())
            if job is self._due[0][2]:
                self.expire(-NEVER)  # it, and those behind it that are computed

    def end(self, job: Job) -> None:
        """It is over, one way or another. May be called again."""
        self.computed(job)
        self.kv -= job.kv
        job.kv = 0

    def _compute(self, job: Job, now: float) -> None:
        if not job.tokens:
            return
        self.queued -= job.tokens
        job.tokens = 0
        line = self._line
        if line[0] is job:
            while line and not line[0].tokens:
                line.popleft()
            self.front, self.since = line[0].tokens if line else 0, now
