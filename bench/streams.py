"""Streamed load: many kept-alive connections, each running one stream after the other, every stream checked.

Run as `python -m bench.streams PORT STREAMS REPEAT FIRST_SERIAL`; prints one JSON document, see `summary`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from functools import partial
from typing import Any, cast

import uvloop

from bench import payloads
from bench.process import LOOPBACK
from bench.stats import percentile

END = b"0\r\n\r\n"
SPAN = payloads.STREAM_PERIOD_MS / 1e3 * (payloads.STREAM_CHUNKS - 1)  # seconds that one stream takes at its pace


class Broken(ValueError):
    """What came is not the stream that the upstream sent."""


def body_of(raw: bytes) -> bytes:
    """The body of a complete chunked 200 answer. Raises Broken for anything else."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise Broken("status")
    body, at = bytearray(), 0
    try:
        while size := int(rest[at : (line := rest.index(b"\r\n", at))].partition(b";")[0], 16):
            body += rest[line + 2 : line + 2 + size]
            at = line + 2 + size + 2
    except ValueError:
        raise Broken("framing") from None
    return bytes(body)


def text_of(body: bytes) -> str | None:
    """The text that the deltas of a stream add up to; None unless it is a whole one that ends in [DONE]."""
    events = [event.partition(b"data: ")[2] for event in body.split(b"\n\n") if event.strip()]
    if not events or events.pop().strip() != b"[DONE]":
        return None
    try:
        choices = [choice for event in events if event for choice in json.loads(event)["choices"]]
    except (ValueError, KeyError, TypeError):
        return None
    return "".join(choice["delta"].get("content") or "" for choice in choices)


class Stream(asyncio.Protocol):
    """One connection. Answers are kept and judged after the run, so that judging does not disturb it."""

    transport: asyncio.Transport

    def __init__(self, port: int, serial: int, repeat: int, finished: asyncio.Future[None]) -> None:
        self._port, self._serial, self._left, self._finished = port, serial, repeat, finished
        self._buffer = bytearray()
        self._sent = 0.0
        self._first = False
        self.ttft: list[float] = []  # seconds
        self.durations: list[float] = []
        self.answers: list[bytes] = []
        self.reads = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def begin(self) -> None:
        body = payloads.stream_request(self._serial)
        self._serial += 1
        self._left -= 1
        self._first = False
        head = f"POST {payloads.CHAT} HTTP/1.1\r\nhost: {LOOPBACK}:{self._port}\r\n"
        head += f"authorization: Bearer {payloads.KEY}\r\ncontent-type: application/json\r\n"
        data = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        self._sent = time.perf_counter()
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self.reads += 1
        if not self._first and b"data: " in self._buffer:
            self._first = True
            self.ttft.append(time.perf_counter() - self._sent)
        # an answer that is no stream would never end in the last chunk: it is over with what came
        refused = not self._first and not self._buffer.startswith(b"HTTP/1.1 200")
        if self._buffer.endswith(END) or refused:
            self.durations.append(time.perf_counter() - self._sent)
            self.answers.append(bytes(self._buffer))
            self._buffer.clear()
            if self._left and not refused:
                self.begin()
            else:
                self.transport.close()

    @property
    def open(self) -> bool:
        return not self._finished.done()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._finished.done():
            self._finished.set_result(None)


def summary(streams: list[Stream], wanted: int) -> dict[str, Any]:
    """Counts, and milliseconds. `failures` by kind: every stream that is missing or has another text is in it.
    `altered` are those whose text is right and whose bytes are not the upstream's."""
    expected = b"".join(payloads.stream_events())
    text = text_of(expected)
    failures: Counter[str] = Counter()
    good = altered = 0
    for answer in (a for s in streams for a in s.answers):
        try:
            if (body := body_of(answer)) == expected:
                good += 1
            elif text_of(body) == text:
                good += 1
                altered += 1
            else:
                failures["content"] += 1
        except Broken as error:
            failures[str(error)] += 1
    missing = wanted - sum(len(s.answers) for s in streams)
    if missing:
        failures["unfinished"] += missing
    ttft = sorted(t * 1e3 for s in streams for t in s.ttft)
    durations = sorted(t * 1e3 for s in streams for t in s.durations)
    chunks = good * payloads.STREAM_CHUNKS
    return {
        "streams": good,
        "chunks": chunks,
        "altered": altered,
        "failures": dict(failures),
        "reads_per_chunk": round(sum(s.reads for s in streams) / chunks, 3) if chunks else None,
        "ttft_p50_ms": percentile(ttft, 50),
        "ttft_p99_ms": percentile(ttft, 99),
        "duration_p50_ms": percentile(durations, 50),
        "duration_p99_ms": percentile(durations, 99),
    }


def _same(stream: Stream) -> Stream:
    return stream


async def run(port: int, count: int, repeat: int, first_serial: int) -> dict[str, Any]:
    """`count` connections, their starts spread over one stream's time, `repeat` streams on each."""
    loop = asyncio.get_running_loop()
    finished = [loop.create_future() for _ in range(count)]
    streams: list[Stream] = []
    try:
        async with asyncio.timeout(SPAN * (repeat + 1) * 3 + 20):
            for number in range(count):
                stream = Stream(port, first_serial + number * repeat, repeat, finished[number])
                streams.append(stream)
                try:
                    await loop.create_connection(partial(_same, stream), LOOPBACK, port)
                except OSError:
                    stream.connection_lost(None)  # its streams are counted as unfinished
            for stream in streams:
                if stream.open:
                    stream.begin()
                await asyncio.sleep(SPAN / count)
            await asyncio.gather(*finished)
    except TimeoutError:
        print("streams: out of time", file=sys.stderr)  # what is missing is counted as unfinished
    return summary(streams, count * repeat)


if __name__ == "__main__":
    print(json.dumps(uvloop.run(run(*(int(x) for x in sys.argv[1:5])))))
