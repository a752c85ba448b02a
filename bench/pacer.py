"""The upstream for streams: every streamed chat request gets 64 SSE chunks, the first at once, then one every 10 ms.

Run as `python -m bench.pacer PORT`. One timer serves all streams: a wheel with a slot for each millisecond of the period,
so streams keep the phase in which they came, and a late wake-up makes up for what it missed.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import cast

import uvloop

from bench import payloads
from bench.process import LOOPBACK

CHAT = f"POST {payloads.CHAT} ".encode()
STREAMED = re.compile(rb'"stream": *true')
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
HEAD = b"HTTP/1.1 200 OK\r\nserver: pacer\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked_stream() -> list[bytes]:
    """What each write puts on the wire; the first with the head, the last with the end of the message."""
    chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in payloads.stream_events()]
    chunks[0] = HEAD + chunks[0]
    chunks[-1] += b"0\r\n\r\n"
    return chunks


class Wheel:
    """Calls `step` of each stream once a period. It turns only while there are streams."""

    def __init__(self, loop: asyncio.AbstractEventLoop, period_ms: int) -> None:
        self._loop = loop
        self._slots: list[list[Engine]] = [[] for _ in range(period_ms)]
        self._start = loop.time()
        self._turned = 0  # milliseconds served since _start
        self._streams = 0

    def add(self, stream: Engine) -> None:
        if self._streams == 0:
            self._start, self._turned = self._loop.time(), 0
            self._loop.call_later(0.001, self._turn)
        self._streams += 1
        now = max(self._turned, int((self._loop.time() - self._start) * 1000))
        self._slots[now % len(self._slots)].append(stream)

    def _turn(self) -> None:
        due = int((self._loop.time() - self._start) * 1000)
        while self._turned < due:
            self._turned += 1
            at = self._turned % len(self._slots)
            streams, self._slots[at] = self._slots[at], []
            kept = [stream for stream in streams if stream.step()]
            self._slots[at] += kept
            self._streams -= len(streams) - len(kept)
        if self._streams:
            wait = self._start + (self._turned + 1) / 1000 - self._loop.time()
            self._loop.call_later(max(wait, 0.0), self._turn)


class Engine(asyncio.Protocol):
    """One connection of the upstream."""

    transport: asyncio.Transport

    def __init__(self, wheel: Wheel, chunks: list[bytes]) -> None:
        self._wheel, self._chunks = wheel, chunks
        self._buffer = b""
        self._next = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n") + 4
        if end < 4:
            return
        found = LENGTH.search(self._buffer, 0, end)
        if len(self._buffer) < end + (int(found[1]) if found else 0):
            return
        start, body, self._buffer = self._buffer[:end], self._buffer[end:], b""  # nobody pipelines here
        self.answer(start, body)

    def answer(self, start: bytes, body: bytes) -> None:
        """`start` is the request's head."""
        if start.startswith(CHAT) and STREAMED.search(body):
            self._next = 1
            self.transport.write(self._chunks[0])
            self._wheel.add(self)
        else:
            self.plain(start.split(b" ")[1])

    def step(self) -> bool:
        """Writes the next chunk; False once there is none or the peer has gone."""
        if self.transport.is_closing():
            return False
        self.transport.write(self._chunks[self._next])
        self._next += 1
        return self._next < len(self._chunks)

    def plain(self, path: bytes) -> None:
        bodies = {
            payloads.CHAT.encode(): payloads.answer(),
            b"/v1/models": payloads.models(),
            b"/metrics": payloads.metrics(),
            b"/health": b"",
        }
        status = b"200 OK" if path in bodies else b"404 Not Found"
        kind = b"text/plain" if path == b"/metrics" else b"application/json"
        body = bodies.get(path, b"{}")
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status, kind, len(body), body)
        )


async def serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    wheel, chunks = Wheel(loop, payloads.STREAM_PERIOD_MS), chunked_stream()
    server = await loop.create_server(lambda: Engine(wheel, chunks), LOOPBACK, port, backlog=1024)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
