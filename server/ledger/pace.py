"""Lets events be applied beside requests: in short turns, and never more than half of the time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import perf_counter

TURN = 0.002  # seconds


class Pace:
    """One for all streams of a process, which take turns in order of arrival.

    Work comes as an iterator that pauses often. After `turn` seconds of work, whoever did it, the event loop is left alone for
    as long.
    """

    def __init__(self, turn: float = TURN) -> None:
        self.turn = turn
        self._left = turn
        self._free = asyncio.Lock()
        self.rests = 0

    async def work(self, job: Iterator[None]) -> None:
        """Runs the job to its end."""
        async with self._free:
            while True:
                if self._left <= 0:
                    self.rests += 1
                    await asyncio.sleep(self.turn)
                    self._left = self.turn
                began = perf_counter()
                ended = _run(job, began + self._left)
                self._left -= perf_counter() - began
                if ended:
                    return


def _run(job: Iterator[None], until: float) -> bool:
    """Goes on with the job until it ends (True) or the time is over."""
    return all(perf_counter() < until for _ in job)
