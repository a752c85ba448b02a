"""When requests are due: offsets from the start of a window, in whole nanoseconds, fixed before the first is sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from loadtest.vocabulary import numbers

ArrivalKind = Literal["poisson", "constant"]
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` requests in flight: the next is sent when one ends. It measures capacity; it cannot overload."""

    concurrency: int

    def __str__(self) -> str:
        return f"closed loop, {self.concurrency} in flight"


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests come at `rate` a second whatever the engine does, as users do."""

    arrivals: ArrivalKind
    rate: float

    def __str__(self) -> str:
        return f"open loop, {self.arrivals} arrivals, {self.rate:g} requests/s"


Load = ClosedLoop | OpenLoop


def offsets_ns(load: OpenLoop, count: int, seed: int) -> tuple[int, ...]:
    """The first request is due at 0. Constant gaps are computed from the start, so that rounding never adds up."""
    if load.arrivals == "constant":
        return tuple(round(i * _NS / load.rate) for i in range(count))
    words = numbers(seed, "arrivals/gaps", 2 * count)
    due, out = 0.0, [0] if count else []
    for i in range(count - 1):
        # 53 random bits in (0, 1]: log(0) cannot happen
        uniform = ((int(words[2 * i]) << 21 | int(words[2 * i + 1]) >> 11) + 1) / (1 << 53)
        due -= math.log(uniform) / load.rate
        out.append(round(due * _NS))
    return tuple(out)
