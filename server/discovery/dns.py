"""Engines behind a DNS name, as behind a headless service of Kubernetes: every address is a replica."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection
from urllib.parse import urlsplit

from kvgate.errors import UsageError
from server.replica import EngineUrl

logger = logging.getLogger("kvgate")

Resolve = Callable[[str, int], Awaitable[Collection[str]]]  # name and port -> addresses; raises OSError
SCHEME = "dns://"


async def resolve(name: str, port: int) -> set[str]:
    """Every address of `name`, IPv4 and IPv6, by the system's resolver (its hosts file included); raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return {str(address[0]) for *_, address in found}


class DnsSource:
    """`dns://name:port`: the addresses of `name`, each an engine at `port` that speaks HTTP.

    Where the name cannot be resolved, or has no address, the last answer stays: the health checks know better which of
    them live. interval: seconds between two look-ups. timeout: seconds that one may take.
    """

    def __init__(
        self, name: str, port: int, interval: float = 5.0, resolve: Resolve = resolve, timeout: float = 5.0
    ) -> None:
        self._name, self._port = name, port
        self._resolve = resolve
        self._timeout = timeout
        self._urls: frozenset[EngineUrl] = frozenset()
        self._failed = False
        self.interval = interval

    @classmethod
    def parse(cls, text: str, interval: float = 5.0, resolve: Resolve = resolve) -> DnsSource:
        """From `dns://name:port`; raises UsageError."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise UsageError(f"--engine {text!r}: {error}") from None
        if not parts.hostname or not port or parts.path.rstrip("/") or parts.query or parts.fragment or parts.username:
            raise UsageError(f"--engine {text!r} is not of the form dns://name:port")
        return cls(parts.hostname, port, interval, resolve)

    async def look(self) -> frozenset[EngineUrl]:
        try:
            async with asyncio.timeout(self._timeout):
                addresses = await self._resolve(self._name, self._port)
            if not addresses:
                raise OSError("it has no address")
        except (OSError, UnicodeError) as error:  # TimeoutError is an OSError; a name that is none fails to encode
            if not self._failed:
                self._failed = True
                why = str(error) or "no answer in time"
                logger.warning("cannot resolve %s: %s; %d engines stay", self._name, why, len(self._urls))
            return self._urls
        self._failed = False
        self._urls = frozenset(EngineUrl("http", address, self._port) for address in addresses)
        return self._urls
