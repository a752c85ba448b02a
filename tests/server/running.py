"""A gateway on a real socket, inside the test's own event loop, served exactly as `kvgate serve` does."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from prometheus_client import generate_latest

from kvgate.settings import Settings
from server.gateway import Gateway
from server.run import configure


@dataclass
class RunningGateway:
    gateway: Gateway
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metric(self, name: str, **labels: str) -> float | None:
        """The sum of the series of `name` that carry these labels; None if there is none."""
        found = None
        for line in generate_latest(self.gateway.metrics.registry).decode().splitlines():
            match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            if match and match[1] == name:
                has = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
                if labels.items() <= has.items():
                    found = (found or 0.0) + float(match[3])
        return found

    @property
    def inflight(self) -> int:
        return sum(replica.inflight for replica in self.gateway.replicas.all)

    async def idle(self, seconds: float = 5.0) -> None:
        """Returns once no request is at a replica."""
        async with asyncio.timeout(seconds):
            while self.inflight:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def running_gateway(*engines: str, **settings: object) -> AsyncIterator[RunningGateway]:
    """`settings` are those of kvgate.settings; intervals and time-outs are short unless given."""
    quick: dict[str, object] = {
        "port": 0,
        "connect_timeout": 1.0,
        "health_interval": 0.1,
        "scrape_interval": 0.1,
        "keep_alive_timeout": 5.0,
        "drain_timeout": 5.0,
    }
    gateway = Gateway.build(Settings(**{**quick, **settings}), list(engines))  # type: ignore[arg-type]
    server = uvicorn.Server(configure(gateway))
    task = asyncio.create_task(server._serve())  # without uvicorn's signal handlers, which belong to a process
    try:
        while not server.started:
            await asyncio.sleep(0.005)
            if task.done():
                task.result()
        yield RunningGateway(gateway, server.servers[0].sockets[0].getsockname()[1])
    finally:
        for connection in list(gateway.connections):
            connection.transport.close()
        server.should_exit = True
        await task
