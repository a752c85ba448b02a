"""Server-sent events as bytes. An event ends at an empty line; lines end in LF or CRLF (engines send no bare CR).

What an event holds never decides where it ends: `data: [DONE]` inside a JSON string has its line break escaped.
"""

from __future__ import annotations

from collections.abc import Iterator

DONE = b"[DONE]"


def border(data: bytes | bytearray, start: int = 0) -> int:
    """The offset behind the last empty line in `data`, or 0 if there is none at or after `start`."""
    lf, crlf = data.rfind(b"\n\n", start), data.rfind(b"\n\r\n", start)
    return max(lf + 2 if lf >= 0 else 0, crlf + 3 if crlf >= 0 else 0)


class EventBuffer:
    """Gives whole events on, as the very bytes that came, and holds back the rest.

    Raises OverflowError where one event exceeds `limit` bytes.
    """

    __slots__ = ("_limit", "_rest")

    def __init__(self, limit: int = 16 * 1024 * 1024) -> None:
        self._rest = bytearray()
        self._limit = limit

    def take(self, data: bytes) -> bytes:
        """All bytes up to the last border in what was held and `data`; empty if there is none yet."""
        rest = self._rest
        if not rest and data.endswith(b"\n\n"):  # nearly always: an engine writes one event a time
            return data
        start = max(0, len(rest) - 2)  # a border of up to three bytes may straddle the seam
        rest += data
        end = border(rest, start)
        if end == 0:
            if len(rest) > self._limit:
                raise OverflowError(f"an event exceeds {self._limit} bytes")
            return b""
        whole = bytes(rest[:end])
        del rest[:end]
        return whole

    @property
    def rest(self) -> bytes:
        """The bytes behind the last border."""
        return bytes(self._rest)


def events(data: bytes) -> Iterator[bytes]:
    """The data of each event in `data`, whole events as `EventBuffer.take` gives them; several data lines join by LF."""
    lines: list[bytes] = []
    for raw in data.split(b"\n"):
        line = raw.removesuffix(b"\r")
        if line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
        elif not line and lines:
            yield b"\n".join(lines)
            lines.clear()
