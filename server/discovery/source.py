"""What every source of engines has in common, and the simplest one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from server.replica import EngineUrl


class Source(Protocol):
    """Says which engines are wanted. `interval`: seconds between two looks; None where the first answer stays."""

    @property
    def interval(self) -> float | None: ...

    async def look(self) -> frozenset[EngineUrl]:
        """The wanted engines. Where they cannot be told now, the last answer, and a warning the first time. Never raises."""


class StaticSource:
    """Engines that were given one by one."""

    interval = None

    def __init__(self, urls: Iterable[EngineUrl]) -> None:
        self._urls = frozenset(urls)

    async def look(self) -> frozenset[EngineUrl]:
        return self._urls
