"""Sends the requests of one block, closed or open loop. Nothing is skipped, nothing is sent twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Protocol

from loadtest.client import Sender, Shot
from loadtest.outcome import Outcome

Done = Callable[[Outcome], None]

# the first request is due a little after the start, so that it is not late by the time it takes to begin
_LEAD_NS = 50_000_000


class Clock(Protocol):
    def now_ns(self) -> int: ...

    async def sleep_until(self, due_ns: int) -> None: ...


class MonotonicClock:
    """perf_counter: no step of the wall clock can move a request."""

    def now_ns(self) -> int:
        return perf_counter_ns()

    async def sleep_until(self, due_ns: int) -> None:
        # also when due: yields once, so that a client that is behind still lets answers be read
        await asyncio.sleep(max(0, due_ns - perf_counter_ns()) / 1e9)


async def open_loop(shots: Sequence[Shot], sender: Sender, done: Done, clock: Clock | None = None) -> list[Outcome]:
    """Every request has one due time, fixed at the start. Who is late is sent at once and its lag recorded; the
    following ones keep their times."""
    clock = clock or MonotonicClock()
    start = clock.now_ns() + _LEAD_NS
    tasks: list[asyncio.Task[Outcome]] = []

    async def one(shot: Shot, due_ns: int) -> Outcome:
        outcome = await sender.send(shot, due_ns)
        done(outcome)
        return outcome

    async with asyncio.TaskGroup() as group:
        for shot in shots:
            assert shot.request.at_ns is not None, "an open loop needs a planned time for each request"
            due_ns = start + shot.request.at_ns
            await clock.sleep_until(due_ns)
            tasks.append(group.create_task(one(shot, due_ns)))
    return [task.result() for task in tasks]


async def closed_loop(
    shots: Sequence[Shot], concurrency: int, sender: Sender, done: Done, clock: Clock | None = None
) -> list[Outcome]:
    """`concurrency` users; each takes the next request in the order of the plan when its last one has ended.

    A turn waits for the turn before it, as a user does; that wait is before its due time.
    """
    clock = clock or MonotonicClock()
    queue = iter(shots)
    ended = {_key(shot): asyncio.Event() for shot in shots}
    outcomes: list[Outcome] = []

    async def user() -> None:
        for shot in queue:
            previous = ended.get((*_key(shot)[:2], shot.request.turn - 1))
            if previous is not None:
                await previous.wait()
            outcome = await sender.send(shot, clock.now_ns())
            ended[_key(shot)].set()
            outcomes.append(outcome)
            done(outcome)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(shots))):
            group.create_task(user())
    return outcomes


def _key(shot: Shot) -> tuple[int, int, int]:
    return shot.request.group, shot.request.session, shot.request.turn
