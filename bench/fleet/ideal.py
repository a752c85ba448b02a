"""What could have hit: the same requests, one after the other, in the simulator's cache with the memory of the whole fleet."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from bench.fleet.trace import BLOCK, Ask, numbers
from loadtest.sim.cache import KvCache
from loadtest.sim.hashing import ALGORITHMS, TOKEN
from loadtest.sim.request import Request
from loadtest.sim.scheduler import Limits, Scheduler
from loadtest.sim.text import WORDS

ANSWER = len(WORDS)  # in no prompt


def delivered(asks: Iterable[Ask], blocks: int) -> int:
    """Prompt tokens that one engine with so many blocks, the null block not counted, takes from its cache."""
    room = blocks * BLOCK
    scheduler = Scheduler(KvCache(blocks + 1, BLOCK, room), Limits(room, 1), lambda _: ANSWER)
    hit = 0
    for number, ask in enumerate(asks):
        prompt = array(TOKEN, numbers(ask))
        request = Request(str(number), prompt, ask.output, BLOCK, hashing=ALGORITHMS["fast"])
        scheduler.add(request)
        while scheduler.busy:
            scheduler.update(scheduler.schedule())
        hit += request.cached_tokens
    return hit
