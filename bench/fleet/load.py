"""The open loop: each request is sent when it is due, whatever became of those before it.

`python -m bench.fleet.load PORT PLAN OUT` reads one JSON object a line: {"due_s", "body", "session"}; and writes
one for each to OUT, in the same order: {"status", "lag_s", "ttft_s", "end_s", "prompt", "cached"}. Times are in seconds from
when the request was due; null is what never came.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import httptools
import uvloop

from bench import payloads
from bench.process import LOOPBACK

PATH = "/v1/completions"
DONE = b"data: [DONE]"
PATIENCE = 60.0  # s after the last request was due
WARM = 32  # connections that are open before the first request

_PROMPT = re.compile(rb'"prompt_tokens":\s*(\d+)')
_CACHED = re.compile(rb'"cached_tokens":\s*(\d+)')


@dataclass(slots=True)
class Result:
    """Of one request; times in seconds of perf_counter."""

    due: float
    status: int = 0  # 0: no answer
    sent: float | None = None
    first: float | None = None
    end: float | None = None
    prompt: int | None = None
    cached: int | None = None

    def row(self) -> dict[str, Any]:
        def after(at: float | None) -> float | None:
            return None if at is None else round(at - self.due, 6)

        return {
            "status": self.status,
            "lag_s": after(self.sent),
            "ttft_s": after(self.first),
            "end_s": after(self.end),
            "prompt": self.prompt,
            "cached": self.cached,
        }


class Connection(asyncio.Protocol):
    """One request at a time. It goes back to `idle` when an answer is complete and may be followed by another."""

    transport: asyncio.Transport

    def __init__(self, idle: list[Connection]) -> None:
        self._idle = idle
        self._answer = bytearray()
        self._result: Result | None = None
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def send(self, data: bytes, result: Result) -> asyncio.Future[None]:
        self._result, self._done = result, asyncio.get_running_loop().create_future()
        self._answer.clear()
        self._parser = httptools.HttpResponseParser(self)
        self.transport.write(data)
        result.sent = time.perf_counter()
        return self._done

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        if self._result is None:
            return
        self._answer += body
        if self._result.first is None and b"data: " in self._answer:
            self._result.first = time.perf_counter()

    def on_message_complete(self) -> None:
        result = self._result
        if result is None:
            return
        result.status = self._parser.get_status_code()
        if result.status == 200 and DONE in self._answer:
            result.end = time.perf_counter()
            result.prompt, result.cached = _last(_PROMPT, self._answer), _last(_CACHED, self._answer)
        if self._parser.should_keep_alive():
            self._idle.append(self)
        else:
            self.transport.close()
        self._over()

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)
        self._over()

    def _over(self) -> None:
        self._result = None
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


def _last(pattern: re.Pattern[bytes], answer: bytes | bytearray) -> int | None:
    found = pattern.findall(answer)
    return int(found[-1]) if found else None


def wire(port: int, body: bytes, session: str) -> bytes:
    head = f"POST {PATH} HTTP/1.1\r\nhost: {LOOPBACK}:{port}\r\nauthorization: Bearer {payloads.KEY}\r\n"
    head += f"content-type: application/json\r\nx-session-id: {session}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Load:
    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Connection] = []
        self._connections: list[Connection] = []

    async def run(self, plan: Sequence[dict[str, Any]]) -> list[Result]:
        """plan: ordered by `due_s`."""
        ready = [(row["due_s"], wire(self._port, row["body"].encode(), row["session"])) for row in plan]
        for _ in range(WARM):
            self._idle.append(await self._connect())
        begin = time.perf_counter() + 0.1
        results = [Result(begin + due) for due, _ in ready]
        waiting: set[asyncio.Task[None]] = set()
        for result, (_, data) in zip(results, ready, strict=True):
            await asyncio.sleep(max(0.0, result.due - time.perf_counter()))
            task = asyncio.create_task(self._one(data, result))
            waiting.add(task)
            task.add_done_callback(waiting.discard)
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=PATIENCE)
            for task in late:
                task.cancel()
        for connection in self._connections:
            connection.transport.abort()
        return results

    async def _one(self, data: bytes, result: Result) -> None:
        try:
            connection = self._idle.pop() if self._idle else await self._connect()
        except OSError:
            return  # the status stays 0
        await connection.send(data, result)

    async def _connect(self) -> Connection:
        make = partial(Connection, self._idle)
        _, connection = await asyncio.get_running_loop().create_connection(make, LOOPBACK, self._port)
        self._connections.append(connection)
        return connection


def main(port: str, plan: str, out: str) -> None:
    rows = [json.loads(line) for line in Path(plan).read_text().splitlines()]
    results = uvloop.run(Load(int(port)).run(rows))
    Path(out).write_text("".join(json.dumps(result.row()) + "\n" for result in results))


if __name__ == "__main__":
    main(*sys.argv[1:4])
