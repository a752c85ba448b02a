"""Policy `cost`: to the replica that gives the first token soonest, in seconds.

    cost = (queued + (1 + AFTER) * miss) / rate + PRESSURE * k / (1 - k) + RUNNING * requests in flight

queued: uncached tokens sent there whose first token has not come. miss: those of this prompt that it does not hold; what it is
thought to hold counts by its `faith`: how far its deliveries bear out predictions, and less while its events have gaps. rate: its
measured prefill rate. k: the share of its KV memory that is in use once this request runs; near 1 the engine preempts, which
computes prompts twice. A hot prefix spreads by itself as soon as waiting for it costs more than computing it elsewhere; where
both take as long, the miss weighs more, since whoever comes after has to wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from server.routing.asked import Asked

if TYPE_CHECKING:
    from server.replica import Replica

RATE = 5000.0  # tokens/s of a replica where none has been measured: a guess that only has to be the same for all
PRESSURE = 0.05  # s
AFTER = 0.25  # of the time that computing takes: its price for requests that come after
RUNNING = 0.0002  # s that one more running request adds to a step, and so to the first token of the next: a guess
FULLEST = 0.98  # KV memory in use above which all are alike
ALIKE = 0.001  # s; and
ALIKE_SHARE = 0.02  # of the smallest cost: less is no difference


class Cost(NamedTuple):
    """Of one replica for one prompt: seconds in all and for KV pressure; tokens that it holds, has to compute, and has to
    compute before; tokens a second."""

    seconds: float
    held: int
    miss: float
    queued: int
    rate: float
    pressure: float


class CostPolicy:
    """See the module. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._turn = 0

    def costs(self, fit: Sequence[Replica], asked: Asked) -> list[Cost]:
        """Of each replica, in their order."""
        return [Cost(*row) for row in self._rows(fit, asked)]

    def _rows(self, fit: Sequence[Replica], asked: Asked) -> list[tuple[float, int, float, int, float, float]]:
        """The fields of `Cost`. One loop without calls: with 64 replicas a call for each is as dear as the match."""
        now, prompt, most, output = self._clock(), asked.tokens, max(asked.tokens - 1, 0), asked.output
        held_by, weight, usual = asked.match.tokens, 1.0 + AFTER, 0.0
        rows = []
        for replica in fit:
            work = replica.work
            if work.next_due <= now:
                work.expire(now)
            held, miss = 0, float(prompt)
            if replica.name in held_by:
                held = held_by[replica.name]
                if held > most:
                    held = most
                miss -= held * replica.faith
            rate = replica.prefill.tokens_per_second
            if rate is None:
                usual = rate = usual or usual_rate(fit)
            used, tokens, pressure = replica.kv_utilization or 0.0, replica.kv_tokens, 0.0
            if tokens:
                promised = work.kv / tokens
                if promised > used:
                    used = promised
                used += (miss + output) / tokens
            if used:
                if used > FULLEST:
                    used = FULLEST
                pressure = PRESSURE * used / (1.0 - used)
            queued = work.queued
            seconds = (queued + weight * miss) / rate + pressure + RUNNING * replica.inflight
            rows.append((seconds, held, miss, queued, rate, pressure))
        return rows

    def choose(self, fit: Sequence[Replica], asked: Asked) -> Replica:
        """The cheapest; among those alike, where most is held; among these in turn."""
        if len(fit) == 1:
            return fit[0]
        rows = self._rows(fit, asked)
        best = min(rows)[0]
        limit = best + max(ALIKE, ALIKE_SHARE * best)
        alike = [at for at, row in enumerate(rows) if row[0] <= limit]
        most = max(rows[at][1] for at in alike)
        choices = [fit[at] for at in alike if rows[at][1] == most]
        if len(choices) == 1:
            return choices[0]
        self._turn = turn = self._turn + 1
        return choices[turn % len(choices)]


def usual_rate(replicas: Sequence[Replica]) -> float:
    """Tokens a second that a replica which has not been measured is taken to compute: what the others do."""
    known = [rate for replica in replicas if (rate := replica.prefill.tokens_per_second) is not None]
    return median(known) if known else RATE
