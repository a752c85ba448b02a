"""HTTP/1.1 as bytes: how the fakes spell and take apart messages, apart from any socket.

Strict on purpose: it is the judge in tests of framing, so what RFC 9112 forbids raises FramingError.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

Headers = list[tuple[str, str]]

REASONS = {100: "Continue", 102: "Processing", 103: "Early Hints", 200: "OK", 204: "No Content", 400: "Bad Request"}


class FramingError(ValueError):
    """The bytes are not the HTTP/1.1 message that they claim to be."""


def head(status: int, headers: Iterable[tuple[str, str]] = (), version: str = "1.1") -> bytes:
    """A response head, the empty line included."""
    lines = [f"HTTP/{version} {status} {REASONS.get(status, 'Status')}", *(f"{k}: {v}" for k, v in headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def chunk(data: bytes) -> bytes:
    """One chunk of the chunked coding. Empty data would end the message, so it gives no bytes."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


LAST_CHUNK = b"0\r\n\r\n"


def parse_head(raw: bytes) -> tuple[str, Headers]:
    """Start line and headers, names as they were spelled."""
    start, *lines = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    headers = []
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise FramingError(f"bad header line {line!r}")
        headers.append((name, value.strip()))
    return start, headers


def values(headers: Headers, name: str) -> list[str]:
    """Every value of a header, by its case-insensitive name."""
    return [v for k, v in headers if k.lower() == name.lower()]


def body_length(headers: Headers) -> int | str | None:
    """Content-Length, or "chunked", or None where neither is given."""
    coded, lengths = values(headers, "transfer-encoding"), values(headers, "content-length")
    if coded and lengths:
        raise FramingError("both transfer-encoding and content-length")
    if coded:
        if coded != ["chunked"]:
            raise FramingError(f"transfer-encoding {coded}")
        return "chunked"
    if len(set(lengths)) > 1 or not all(v.isascii() and v.isdigit() for v in lengths):
        raise FramingError(f"content-length {lengths}")
    return int(lengths[0]) if lengths else None


class Dechunker:
    """Takes the chunked coding apart as bytes come. `feed` returns how many bytes it used: all of them until `done`."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.chunks: list[bytes] = []
        self.trailers: Headers = []
        self.done = False
        self._pending = bytearray()
        self._trailing = False

    def feed(self, data: bytes) -> int:
        before = len(self._pending)
        self._pending += data
        used = 0
        while not self.done:
            step = self._line_or_chunk(used)
            if step == 0:
                break
            used += step
        if self.done:
            self._pending.clear()
            return used - before
        del self._pending[:used]
        return len(data)

    def _line_or_chunk(self, at: int) -> int:
        """Bytes of the next complete element at `at`; 0 while it is not there yet."""
        end = self._pending.find(b"\r\n", at)
        if end < 0:
            return 0
        line = bytes(self._pending[at:end])
        if self._trailing:
            if line:
                name, _, value = line.decode("latin-1").partition(":")
                self.trailers.append((name, value.strip()))
            else:
                self.done = True
            return end + 2 - at
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError:
            raise FramingError(f"bad chunk size {line[:40]!r}") from None
        if size == 0:
            self._trailing = True
            return end + 2 - at
        stop = end + 2 + size
        if len(self._pending) < stop + 2:
            return 0
        if self._pending[stop : stop + 2] != b"\r\n":
            raise FramingError("a chunk is longer than it says")
        data = bytes(self._pending[end + 2 : stop])
        self.chunks.append(data)
        self.body += data
        return stop + 2 - at


def pieces(data: bytes, splits: Iterable[int]) -> list[bytes]:
    """`data` cut before each of the given offsets; empty pieces are left out."""
    marks = [0, *sorted(splits), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(marks) if a < b]
