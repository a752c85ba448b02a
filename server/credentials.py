"""The key that an engine is shown."""

from __future__ import annotations

from server.exchange.http1 import Header


class Credentials:
    """vLLM takes `Authorization: Bearer` alone, Anthropic's clients send `x-api-key`: the one becomes the other.

    `engine_key` is shown in place of whatever the client sent. Where clients show keys of the gateway (`guarded`), these
    never reach an engine.
    """

    def __init__(self, engine_key: str | None = None, guarded: bool = False) -> None:
        self._line = f"authorization: Bearer {engine_key}\r\n".encode() if engine_key else b""
        self._own = guarded or engine_key is not None

    @property
    def headers(self) -> dict[str, str]:
        """Of the gateway's own requests to engines."""
        name, _, value = self._line.decode("ascii").strip().partition(": ")
        return {name: value} if name else {}

    def for_engine(self, shown: list[Header]) -> bytes:
        """The header lines for the engine, in place of the headers in which the client shows keys."""
        if self._own or not shown:
            return self._line
        lines = [b"authorization: %b\r\n" % value for name, value in shown if name == b"authorization"]
        return b"".join(lines) or b"authorization: Bearer %b\r\n" % shown[-1][1]
