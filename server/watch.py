"""Watches each replica: its health, the models it serves, and the few of its metrics that the gateway shows."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import aiohttp
import orjson

from server.gateway import Gateway
from server.replicas import Replica

logger = logging.getLogger("kvgate")

# vLLM's name since 0.9, and the one before
_KV_USAGE = re.compile(rb"^vllm:(?:kv|gpu)_cache_usage_perc(?:\{[^}\n]*\})? ([0-9.eE+-]+)$", re.MULTILINE)
_MAX_BYTES = 8 * 1024 * 1024


def kv_utilization(page: bytes) -> float | None:
    """The share of KV blocks in use, 0 to 1, from an engine's metrics page; the fullest where it runs several. None if absent."""
    values = [float(match) for match in _KV_USAGE.findall(page)]
    return max(values) if values else None


class Watcher:
    """Runs while the gateway runs. A slow engine delays nobody: each replica has its own tasks and time-outs."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._session: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Checks every replica once, so that readiness is right from the first request, then goes on in the background."""
        settings = self._gateway.settings
        timeout = aiohttp.ClientTimeout(total=max(settings.connect_timeout, settings.health_interval))
        self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=True)
        replicas = self._gateway.replicas.all
        await asyncio.gather(*(self.check(replica) for replica in replicas))
        for replica in replicas:
            self._tasks.append(asyncio.create_task(self._every(settings.health_interval, self.check, replica)))
            self._tasks.append(asyncio.create_task(self._every(settings.scrape_interval, self.scrape, replica)))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _every(self, seconds: float, act: Any, replica: Replica) -> None:
        while True:
            await act(replica)
            await asyncio.sleep(seconds)

    async def _get(self, replica: Replica, path: str) -> bytes:
        assert self._session is not None
        async with self._session.get(f"{replica.url}{path}", allow_redirects=False) as response:
            if response.status != 200:
                raise aiohttp.ClientError(f"{path} answered {response.status}")
            return await response.content.read(_MAX_BYTES)

    async def check(self, replica: Replica) -> None:
        """Asks whether the engine is healthy and which models it serves."""
        try:
            await self._get(replica, "/health")
            models = _models(await self._get(replica, "/v1/models"))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            if replica.up:
                logger.warning("%s is down: %s", replica.name, error or type(error).__name__)
            self._gateway.replicas.mark(replica, up=False)
            return
        if not replica.up:
            logger.info("%s is up and serves %s", replica.name, ", ".join(sorted(models)) or "no model")
        self._gateway.replicas.learn(replica, models)
        self._gateway.replicas.mark(replica, up=True)

    async def scrape(self, replica: Replica) -> None:
        """Reads the engine's metrics. A value that is not known now is not shown."""
        gauge = self._gateway.metrics.kv_utilization
        try:
            used = kv_utilization(await self._get(replica, "/metrics"))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            logger.debug("%s: no metrics: %s", replica.name, error)
            used = None
        if used is None:
            gauge.labels(replica.name)  # so that there is one to remove
            gauge.remove(replica.name)
        else:
            gauge.labels(replica.name).set(used)


def _models(body: bytes) -> dict[str, dict[str, Any]]:
    """Name -> entry of an engine's model list; raises ValueError where it is none."""
    page = orjson.loads(body)
    entries = page.get("data") if isinstance(page, dict) else None
    if not isinstance(entries, list):
        raise ValueError("/v1/models is not a list of models")
    return {entry["id"]: entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)}
