"""Which pages of other origins may read answers."""

from __future__ import annotations

from urllib.parse import urlsplit

from kvgate.errors import UsageError
from server.exchange.http1 import Header


class Cors:
    """The configured origins; none by default. Preflight requests are Starlette's, which is given the same origins."""

    def __init__(self, origins: str = "") -> None:
        self.origins = [origin.strip() for origin in origins.split(",") if origin.strip()]
        for origin in self.origins:
            parts = urlsplit(origin)
            if origin != "*" and (
                parts.scheme not in ("http", "https") or f"{parts.scheme}://{parts.netloc}" != origin
            ):
                raise UsageError(f"--cors-origins: {origin!r} is not an origin like https://app.example.org, nor *")
        self._allowed = {origin.encode() for origin in self.origins}

    def lines(self, headers: list[Header]) -> list[bytes]:
        """The header lines for an answer to a request with these headers."""
        if not self._allowed:
            return []
        for name, value in headers:
            if name == b"origin" and (value in self._allowed or b"*" in self._allowed):
                allowed = b"*" if b"*" in self._allowed else value
                return [b"access-control-allow-origin: ", allowed, b"\r\nvary: Origin\r\n", _EXPOSED]
        return [b"vary: Origin\r\n"]


EXPOSED = (
    "x-request-id",
    "x-kvgate-replica",
    "x-kvgate-routed-tokens",
    "x-kvgate-delivered-tokens",
    "x-kvgate-reason",
    "retry-after",
)
_EXPOSED = f"access-control-expose-headers: {', '.join(EXPOSED)}\r\n".encode()
