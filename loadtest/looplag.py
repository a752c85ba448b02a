"""How late this process's event loop runs: when it is late, every latency it measures is too long by as much."""

from __future__ import annotations

import asyncio
from time import perf_counter_ns

_INTERVAL_S = 0.02
_KEEP = 100_000  # half an hour of samples bounds the memory


class LoopLag:
    """`async with LoopLag() as lag:` then `lag.samples_ms`: by how much each 20 ms sleep overslept."""

    def __init__(self) -> None:
        self.samples_ms: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LoopLag:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while len(self.samples_ms) < _KEEP:
            before = perf_counter_ns()
            await asyncio.sleep(_INTERVAL_S)
            self.samples_ms.append(max(0.0, (perf_counter_ns() - before) / 1e6 - _INTERVAL_S * 1e3))
