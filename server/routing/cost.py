"""Policy `cost`: to the replica that gives the first token soonest, in seconds.

    cost = (queued + weight * miss) / rate + PRESSURE * k / (1 - k) + RUNNING * requests in flight
    weight = 1 + AFTER * share

queued: uncached tokens sent there whose first token has not come, less what should be done of the first prompt by now.
miss: those of this prompt that it does not hold; what it is thought to hold counts by its `faith`: how far its deliveries
bear out predictions, and less while its events have gaps. rate: its measured prefill rate. k: the share of its KV memory
that is in use once this request runs; near 1 the engine preempts, which computes prompts twice.

A miss has a further price, AFTER, for whoever comes after: he waits for it, and no longer finds what it evicts. That weighs
more where much was computed lately: share is a replica's part of the fleet's recent work, 1 on the average. So new prompts
renew the memory of all replicas at the same pace, which makes many caches nearly as good as one of their total size; and a
hot prefix spreads by itself as soon as waiting for it costs more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from server.routing.asked import Asked
from server.routing.work import AFTER

if TYPE_CHECKING:
    from server.replica import Replica

RATE = 5000.0  # tokens/s of a replica where none has been measured: a guess that only has to be the same for all
PRESSURE = 0.2  # s
SHARE = (0.8, 1.25)  # within which a replica's share counts: one that has just come is not to get everything
MEMORY = 100_000  # tokens of KV memory of a replica that does not say how many it has; only for how long "lately" is
WEIGHED = 8  # replicas a decision; each decision weighs small fleets anew
FADE = 0.9  # of what was lately, for each eighth of the fleet's memory that is computed
RUNNING = 0.0002  # s that one more running request adds to a step, and so to the first token of the next: a guess
FULLEST = 0.98  # KV memory in use above which all are alike
ALIKE = 0.001  # s; and
ALIKE_SHARE = 0.02  # of the smallest cost: less is no difference


class Cost(NamedTuple):
    """Of one replica for one prompt: seconds in all and for KV pressure; tokens that it holds, has to compute, and has to
    compute before; tokens a second; the weight of a miss."""

    seconds: float
    held: int
    miss: float
    queued: float
    rate: float
    pressure: float
    weight: float


class CostPolicy:
    """See the module. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._turn = 0
        self._decisions = 0  # since replicas were last weighed
        self._placed = 0.0  # tokens, since what was lately last faded

    def costs(self, fit: Sequence[Replica], asked: Asked) -> list[Cost]:
        """Of each replica, in their order."""
        return [Cost(*row) for row in self._rows(fit, asked)]

    def _rows(self, fit: Sequence[Replica], asked: Asked) -> list[tuple[float, int, float, float, float, float, float]]:
        """The fields of `Cost`. One loop without calls: with 64 replicas a call for each is as dear as the match."""
        now, prompt, most, output = self._clock(), asked.tokens, max(asked.tokens - 1, 0), asked.output
        held_by, usual = asked.match.tokens, 0.0
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
            queued, done = float(work.queued), (now - work.since) * rate
            if queued and done > 0.0:
                queued -= done if done < work.front else work.front
            weight = work.weight
            seconds = (queued + weight * miss) / rate + pressure + RUNNING * replica.inflight
            rows.append((seconds, held, miss, queued, rate, pressure, weight))
        return rows

    def choose(self, fit: Sequence[Replica], asked: Asked) -> Replica:
        """The cheapest; among those alike, where most is held; among these in turn. It counts as sent there."""
        if len(fit) == 1:
            return fit[0]
        rows = self._rows(fit, asked)
        best = min(rows)[0]
        limit = best + max(ALIKE, ALIKE_SHARE * best)
        alike = [at for at, row in enumerate(rows) if row[0] <= limit]
        if len(alike) > 1:
            most = max(rows[at][1] for at in alike)
            alike = [at for at in alike if rows[at][1] == most]
        self._turn = turn = self._turn + 1
        at = alike[turn % len(alike)]
        _, _, miss, _, rate, _, _ = rows[at]
        fit[at].work.lately += miss / rate
        self._placed += miss
        self._decisions += 1
        if self._decisions * WEIGHED >= len(fit):
            self._weigh(fit)
        return fit[at]

    def _weigh(self, fit: Sequence[Replica]) -> None:
        """Sets the weights anew, and lets what was lately fade: by work and not by the clock."""
        self._decisions = 0
        if self._placed >= sum([replica.kv_tokens or MEMORY for replica in fit]) / 8:
            self._placed = 0.0
            for replica in fit:
                replica.work.lately *= FADE
        lately = sum([replica.work.lately for replica in fit])
        if lately:
            least, most = SHARE
            for replica in fit:
                share = replica.work.lately * len(fit) / lately
                replica.work.weight = 1.0 + AFTER * min(max(share, least), most)


def usual_rate(replicas: Sequence[Replica]) -> float:
    """Tokens a second that a replica which has not been measured is taken to compute: what the others do."""
    known = [rate for replica in replicas if (rate := replica.prefill.tokens_per_second) is not None]
    return median(known) if known else RATE
