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

    def for_engine(self, headers: list[Header]) -> tuple[list[Header], bytes]:
        """The client's headers less what is not for the engine, and the header line to add."""
        shown = [header for header in headers if header[0] in (b"authorization", b"x-api-key")]
        if not shown:
            return headers, self._line
        if self._own:
            return [header for header in headers if header not in shown], self._line
        if shown[-1][0] == b"authorization" and len(shown) == 1:
            return headers, b""
        passed = [header for header in headers if header[0] != b"x-api-key"]
        if any(name == b"authorization" for name, _ in shown):
            return passed, b""
        return passed, b"authorization: Bearer %b\r\n" % shown[-1][1]
