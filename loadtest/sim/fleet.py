"""Many simulated engines in one process, on ports that count up."""

from __future__ import annotations

import asyncio
from types import TracebackType

import zmq.asyncio

from loadtest.sim.replica import Replica, SimSettings


class Fleet:
    """`async with Fleet(settings) as fleet`: all replicas serve inside. Raises SetupError where a port is taken."""

    def __init__(self, settings: SimSettings) -> None:
        self._settings = settings
        self.replicas: list[Replica] = []

    async def __aenter__(self) -> Fleet:
        self._context = zmq.asyncio.Context()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            for index in range(self._settings.replicas):
                self.replicas.append(Replica(self._settings, index, self.replicas, self._context, self._failed))
                await self.replicas[index].start()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def wait(self) -> None:
        """Until an engine ends by accident; raises what ended it."""
        await asyncio.shield(self._failed)

    async def _close(self) -> None:
        for replica in self.replicas:
            await replica.stop()
        self._failed.cancel()
        self._context.destroy(linger=0)
