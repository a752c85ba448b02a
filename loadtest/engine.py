"""What the engine says of itself over HTTP: version, KV configuration, counters, and when it is idle."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import orjson

from kvgate.errors import SetupError
from loadtest.exposition import Sample, samples, total

_IDLE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Reported by the engine. None is unknown. kv_tokens is the sum over engines, block_size must agree among them."""

    version: str | None
    model: str
    block_size: int | None
    kv_tokens: int | None
    prefix_caching: bool | None
    engines: int


@dataclass(frozen=True, slots=True)
class Counters:
    """Token counters and request gauges, summed over the engines. None where an engine does not have the metric."""

    prompt_tokens: int | None
    cached_tokens: int | None
    hit_tokens: int | None
    running: int | None
    waiting: int | None

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting


class Engine:
    """The engines behind a target, by their metrics pages (none: everything about them is unknown).

    settle_s: seconds between two looks at counters that must not move; longer than a step of the engine.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        metrics_urls: Sequence[str],
        engine_url: str | None,
        settle_s: float = 0.2,
    ) -> None:
        self._session = session
        self._settle_s = settle_s
        self._urls = tuple(metrics_urls)
        first = self._urls[0].removesuffix("/metrics") if self._urls else None
        self._engine_url = engine_url or first

    @property
    def known(self) -> bool:
        return bool(self._urls)

    async def facts(self, model: str) -> EngineFacts:
        pages = [await self._page(url) for url in self._urls]
        infos = [s.labels for page in pages for s in page if s.name == "vllm:cache_config_info"]
        sizes = {_whole(info.get("block_size")) for info in infos}
        if len(sizes) > 1:
            raise SetupError(f"the engines have different block sizes ({sizes}): test them one by one")
        tokens = [_whole(info.get("kv_cache_size_tokens")) for info in infos]
        caching = {info.get("enable_prefix_caching") for info in infos}
        return EngineFacts(
            version=await self._version(),
            model=model,
            block_size=sizes.pop() if sizes else None,
            kv_tokens=sum(t for t in tokens if t is not None) if tokens and None not in tokens else None,
            prefix_caching=caching.pop() == "True" if len(caching) == 1 else None,
            engines=len(self._urls),
        )

    async def counters(self) -> Counters | None:
        if not self.known:
            return None
        pages = [await self._page(url) for url in self._urls]
        return Counters(
            prompt_tokens=_sum(pages, "vllm:prompt_tokens_total"),
            cached_tokens=_sum(pages, "vllm:prompt_tokens_cached_total"),
            hit_tokens=_sum(pages, "vllm:prefix_cache_hits_total"),
            running=_sum(pages, "vllm:num_requests_running"),
            waiting=_sum(pages, "vllm:num_requests_waiting"),
        )

    async def settled(self) -> Counters | None:
        """Counters once nothing runs and they have stopped moving: the engine counts a step after it has answered."""
        loop = asyncio.get_running_loop()
        deadline, last = loop.time() + _IDLE_TIMEOUT_S, await self.counters()
        while last is not None:
            await asyncio.sleep(self._settle_s)
            now = await self.counters()
            if now == last and now.idle:
                return now
            if loop.time() > deadline:
                raise SetupError(
                    f"the engine did not become idle within {_IDLE_TIMEOUT_S:g} s: someone else is using it, "
                    "and counters cannot be told apart"
                )
            last = now
        return None

    async def _page(self, url: str) -> list[Sample]:
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=10)) as response:
                if response.status != 200:
                    raise SetupError(f"--engine-metrics {url}: HTTP {response.status}")
                return list(samples(await response.text()))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise SetupError(f"--engine-metrics {url}: {error or 'no answer in 10 s'}") from error

    async def _version(self) -> str | None:
        """None when the engine cannot be reached directly: a gateway need not forward /version."""
        if self._engine_url is None:
            return None
        try:
            async with self._session.get(
                f"{self._engine_url}/version", timeout=aiohttp.ClientTimeout(total=10)
            ) as response:
                return str(orjson.loads(await response.read())["version"]) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError, KeyError, TypeError):
            return None


def _sum(pages: list[list[Sample]], name: str) -> int | None:
    values = [total(page, name) for page in pages]
    return None if None in values else int(sum(v for v in values if v is not None))


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
