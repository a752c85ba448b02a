"""Watches each replica: its health, the models it serves, and the few of its metrics that the gateway shows."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import aiohttp
import orjson

from server.bodies import read_whole
from server.gateway import Gateway
from server.replicas import Replica, Stage

logger = logging.getLogger("kvgate")

# vLLM's name since 0.9, and the one before
# (not `^`, which costs a millisecond a page)
_KV_USAGE = re.compile(rb"\nvllm:(?:kv|gpu)_cache_usage_perc(?:\{[^}\n]*\})? ([0-9.eE+-]+)$", re.MULTILINE)
_CACHE_CONFIG = re.compile(rb"\nvllm:cache_config_info\{(.*)\} [0-9.eE+-]+$", re.MULTILINE)
_BLOCKS = re.compile(rb'(?:^|,)num_gpu_blocks="([0-9]+)"')
_BLOCK_SIZE = re.compile(rb'(?:^|,)block_size="([0-9]+)"')
_STARTED = re.compile(rb"\nprocess_start_time_seconds ([0-9.eE+]+)$", re.MULTILINE)
_MAX_BYTES = 8 * 1024 * 1024
# A busy engine may keep a health check waiting (it tokenises long prompts in the same loop): silence once is no death
SILENT_CHECKS = 3
SHORTEST_PAUSE = 0.1  # seconds between two checks of a replica, however much it is doubted
DRAIN_LOOK = 0.25  # seconds between two looks whether a draining replica is idle


def kv_utilization(page: bytes) -> float | None:
    """The share of KV blocks in use, 0 to 1, from an engine's metrics page; the fullest where it runs several. None if absent."""
    values = [float(match) for match in _KV_USAGE.findall(page)]
    return max(values) if values else None


def kv_shape(page: bytes) -> tuple[int | None, int | None]:
    """KV blocks on the device and tokens in a block, from an engine's metrics page; None where it does not say.

    vLLM writes the blocks of all its data-parallel ranks together into the line of each of them.
    """
    config = _CACHE_CONFIG.search(page)
    if config is None:
        return None, None
    blocks, size = _BLOCKS.search(config[1]), _BLOCK_SIZE.search(config[1])
    return (int(blocks[1]) or None) if blocks else None, (int(size[1]) or None) if size else None


def process_start(page: bytes) -> float | None:
    """When the engine's process began, in seconds since the epoch; None where its metrics do not say."""
    found = _STARTED.search(page)
    return float(found[1]) if found else None


class Watcher:
    """Runs while the gateway runs. A slow engine delays nobody: each replica has its own tasks and time-outs.

    Replicas that the set adds later are watched from then on; of one that it drains, this notices the end.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._settings = gateway.settings
        self._metrics = gateway.metrics
        self._replicas = gateway.replicas
        self._headers = gateway.credentials.headers  # /v1/models asks for the engine's key
        self._session: aiohttp.ClientSession | None = None
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._doubts: dict[Replica, asyncio.Event] = {}
        self._silent: dict[Replica, int] = {}  # checks in a row that got no answer in time

    async def start(self) -> None:
        """Checks every replica once, so that readiness is right from the first request, then goes on in the background."""
        timeout = aiohttp.ClientTimeout(total=max(self._settings.connect_timeout, self._settings.health_interval))
        # Each look over a connection of its own: that an old one is open says nothing of new ones
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        known = self._replicas.all
        self._replicas.on_add = self._begin
        self._replicas.on_doubt = self._doubt
        await asyncio.gather(*(self.check(replica) for replica in known))
        for replica in known:
            self._begin(replica, checked=True)

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _begin(self, replica: Replica, checked: bool = False) -> None:
        self._doubts[replica] = asyncio.Event()
        self._tasks[replica] = task = asyncio.create_task(self._watch(replica, checked))
        task.add_done_callback(_report)

    def _doubt(self, replica: Replica) -> None:
        if replica in self._doubts:
            self._doubts[replica].set()

    async def _watch(self, replica: Replica, checked: bool) -> None:
        scraping = asyncio.create_task(self._keep_scraping(replica))
        try:
            while not self._replicas.forget(replica):
                draining = replica.stage is Stage.DRAINING
                if not draining and not checked:
                    await self.check(replica)
                checked = False
                await self._pause(replica, DRAIN_LOOK if draining else self._settings.health_interval)
        finally:
            scraping.cancel()
            await asyncio.gather(scraping, return_exceptions=True)
            for known in (self._tasks, self._doubts, self._silent):
                known.pop(replica, None)

    async def _pause(self, replica: Replica, seconds: float) -> None:
        """Returns after so many seconds, or soon if the replica is doubted."""
        shortest = min(SHORTEST_PAUSE, seconds)
        await asyncio.sleep(shortest)
        doubt = self._doubts[replica]
        try:
            async with asyncio.timeout(seconds - shortest):
                await doubt.wait()
        except TimeoutError:
            return
        doubt.clear()

    async def _keep_scraping(self, replica: Replica) -> None:
        while True:
            await self.scrape(replica)
            await asyncio.sleep(self._settings.scrape_interval)

    async def _get(self, replica: Replica, path: str) -> bytes:
        assert self._session is not None
        async with self._session.get(f"{replica.url}{path}", allow_redirects=False) as response:
            if response.status != 200:
                raise aiohttp.ClientError(f"{path} answered {response.status}")
            return await read_whole(response, _MAX_BYTES)

    async def check(self, replica: Replica) -> None:
        """Asks whether the engine is healthy and which models it serves."""
        try:
            await self._get(replica, "/health")
            models = _models(await self._get(replica, "/v1/models"))
        except TimeoutError:
            self._silent[replica] = silent = self._silent.get(replica, 0) + 1
            if silent >= SILENT_CHECKS or not replica.up:
                self._down(replica, "its health check gets no answer")
            return
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._down(replica, error)
            return
        self._silent.pop(replica, None)
        if not replica.up:
            logger.info("%s is up and serves %s", replica.name, ", ".join(sorted(models)) or "no model")
        self._replicas.learn(replica, models)
        self._replicas.mark(replica, up=True)

    def _down(self, replica: Replica, why: object) -> None:
        if replica.up:
            logger.warning("%s is down: %s", replica.name, str(why) or type(why).__name__)
        self._replicas.mark(replica, up=False)

    async def scrape(self, replica: Replica) -> None:
        """Reads the engine's metrics. A value that is not known now is not shown."""
        gauge = self._metrics.kv_utilization
        try:
            page = b"\n" + await self._get(replica, "/metrics")
            replica.prefill.observe(page)
            used = kv_utilization(page)
            replica.kv_blocks, replica.block_size = blocks, size = kv_shape(page)
            replica.kv_tokens = blocks * size if blocks and size else None
            self._replicas.dated(replica, process_start(page))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            logger.debug("%s: no metrics: %s", replica.name, error)
            used = None
        replica.kv_utilization = used
        if used is None:
            gauge.remove(replica.name)
        else:
            gauge.labels(replica.name).set(used)


def _report(task: asyncio.Task[None]) -> None:
    """A fault here would leave a replica unwatched without a word."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a replica is not watched any more", exc_info=error)


def _models(body: bytes) -> dict[str, dict[str, Any]]:
    """Name -> entry of an engine's model list; raises ValueError where it is none."""
    page = orjson.loads(body)
    entries = page.get("data") if isinstance(page, dict) else None
    if not isinstance(entries, list):
        raise ValueError("/v1/models is not a list of models")
    return {entry["id"]: entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)}
