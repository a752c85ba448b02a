"""Keeps the set of replicas as its sources want it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvgate.errors import UsageError
from server.discovery.dns import SCHEME, DnsSource
from server.discovery.file import FileSource
from server.discovery.source import Source, StaticSource
from server.replica import EngineUrl

logger = logging.getLogger("kvgate")


def sources_for(engines: Sequence[str], engines_file: str = "", interval: float = 5.0) -> list[Source]:
    """The sources that the command line names: URLs and `dns://name:port` in `engines`, a file; raises UsageError.

    interval: seconds between two look-ups of a DNS name. A file is looked at every second at least.
    """
    urls = [EngineUrl.parse(text) for text in engines if not text.startswith(SCHEME)]
    names = [url.name for url in urls]
    if len(set(names)) != len(names):
        raise UsageError(f"--engine names the same engine twice: {', '.join(sorted(names))}")
    sources: list[Source] = [StaticSource(urls)] if urls else []
    sources += [DnsSource.parse(text, interval) for text in dict.fromkeys(engines) if text.startswith(SCHEME)]
    if engines_file:
        sources.append(FileSource(Path(engines_file), min(interval, 1.0)))
    return sources


class Discovery:
    """Looks at every source once when it starts, then at each in its interval, and hands on what all of them want."""

    def __init__(self, sources: Iterable[Source], reconcile: Callable[[frozenset[EngineUrl]], None]) -> None:
        self._sources = list(sources)
        self._reconcile = reconcile
        self._wanted: dict[Source, frozenset[EngineUrl]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns when every source has answered."""
        answers = await asyncio.gather(*(source.look() for source in self._sources))
        self._wanted = dict(zip(self._sources, answers, strict=True))
        self._hand_on()
        for source in self._sources:
            if source.interval is not None:
                self._tasks.append(asyncio.create_task(self._follow(source, source.interval)))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, source: Source, interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            try:
                self._wanted[source] = await source.look()
                self._hand_on()
            except Exception:  # a fault in one look must not end discovery for good; it is logged whole
                logger.exception("discovery failed and goes on")

    def _hand_on(self) -> None:
        self._reconcile(frozenset().union(*self._wanted.values()))
