"""The work that a replica was given and has not done yet, as far as this gateway knows."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count

_order = count()
NEVER = float("inf")


class Job:
    """One attempt at one replica. `tokens` are to be computed before its first token; `kv` is what it holds until its end."""

    __slots__ = ("kv", "tokens")

    def __init__(self, tokens: int, kv: int) -> None:
        self.tokens = tokens
        self.kv = kv


class Work:
    """Of one replica, in tokens. A job's uncached tokens count in `queued` until its first token, or, where that cannot be
    seen because the answer is no stream, until it should have come; its KV memory counts in `kv` until it ends.

    `next_due`: monotonic seconds from when on `expire` has something to do.
    """

    __slots__ = ("_due", "kv", "next_due", "queued")

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Job]] = []
        self.next_due = NEVER
        self.queued = 0
        self.kv = 0

    def begin(self, tokens: int, kv: int, due: float) -> Job:
        """A request was sent. `due`: when its prompt counts as computed in any case."""
        job = Job(tokens, kv)
        self.queued += tokens
        self.kv += kv
        if tokens:
            heappush(self._due, (due, next(_order), job))
            self.next_due = self._due[0][0]
        return job

    def expire(self, now: float) -> None:
        """Take what is due for computed."""
        due = self._due
        while due and (due[0][0] <= now or not due[0][2].tokens):
            self._compute(heappop(due)[2])
        self.next_due = due[0][0] if due else NEVER

    def computed(self, job: Job) -> None:
        """Its first token came. May be called again."""
        if job.tokens:
            self._compute(job)
            if job is self._due[0][2]:
                self.expire(-NEVER)  # it, and those behind it that are computed

    def end(self, job: Job) -> None:
        """It is over, one way or another. May be called again."""
        self.computed(job)
        self.kv -= job.kv
        job.kv = 0

    def _compute(self, job: Job) -> None:
        self.queued -= job.tokens
        job.tokens = 0
