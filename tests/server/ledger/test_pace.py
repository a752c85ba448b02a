"""Events leave room for requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import perf_counter

from server.ledger.pace import Pace

TURN = 0.001
STEPS = 10  # that fit into a turn, at most


def work(steps: int, log: list[str] | None = None, name: str = "") -> Iterator[None]:
    for _ in range(steps):
        until = perf_counter() + TURN / STEPS
        while perf_counter() < until:
            pass
        if log is not None:
            log.append(name)
        yield


async def test_the_loop_goes_on_while_a_long_job_runs() -> None:
    pace, turns = Pace(TURN), 0
    job = asyncio.create_task(pace.work(work(30 * STEPS)))
    while not job.done():
        turns += 1
        await asyncio.sleep(0)
    assert pace.rests >= 29
    assert turns > pace.rests


async def test_many_short_jobs_are_held_back_like_a_long_one() -> None:
    pace = Pace(TURN)
    for _ in range(30 * STEPS):
        await pace.work(work(1))
    assert pace.rests >= 29


async def test_streams_take_turns_and_share_one_budget() -> None:
    pace, log = Pace(TURN), list[str]()

    async def stream(name: str) -> None:
        for _ in range(5):
            await pace.work(work(2 * STEPS, log, name))

    await asyncio.gather(stream("a"), stream("b"))
    order = [name for name, before in zip(log, ["", *log], strict=False) if name != before]
    assert order == ["a", "b"] * 5
    assert pace.rests >= 19
