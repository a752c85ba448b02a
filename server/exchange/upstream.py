"""The engine's side: one kept-alive connection, and the pool of those that wait for work."""

from __future__ import annotations

import asyncio
import ssl
from time import monotonic
from typing import Protocol, cast

import httptools

from server.exchange.http1 import AnswerHead, Header

# vLLM closes a connection that was unused for 5 s; one that was unused for nearly as long may be closing already
IDLE_SECONDS = 4.0
MAX_IDLE = 512  # connections kept per engine; more are closed after use
MAX_HEAD_BYTES = 256 * 1024


class AnswerReader(Protocol):
    """Who reads an engine's answer. Called in this order: head once, body any number of times, then end or lost once."""

    def engine_head(self, head: AnswerHead) -> None:
        """The final head."""

    def engine_body(self, data: bytes, last: bool) -> None:
        """Body bytes without their framing; `last` where the answer is complete, and then `data` may be empty."""

    def engine_lost(self, why: str, began: bool) -> None:
        """The answer will not come, or not all of it. `began`: bytes of it had come."""


class EngineConnection(asyncio.Protocol):
    """A connection that carries one request at a time."""

    __slots__ = (
        "_body",
        "_done",
        "_head",
        "_head_due",
        "_headers",
        "_keep",
        "_parser",
        "_pool",
        "_to_eof",
        "_unfinished",
        "began",
        "idle_since",
        "reader",
        "transport",
        "used",
    )

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport | None = None
        self.reader: AnswerReader | None = None
        self.used = False  # carried an earlier request: the engine may close it just as the next one is sent
        self.idle_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self.began = False
        self._headers: list[Header] = []
        self._head: AnswerHead | None = None  # the final one, once it is complete
        self._unfinished = 0  # bytes that came before it was
        self._to_eof = False
        self._body: list[bytes] = []
        self._done = False
        self._keep = False
        self._head_due = False  # the head is complete but not handed on

    # -- for the exchange

    @property
    def usable(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def send(self, reader: AnswerReader, head: bytes, body: bytes) -> None:
        """Sends a request; its answer goes to `reader`."""
        transport = self.transport
        assert transport is not None
        self.reader = reader
        if len(body) <= 16384:
            transport.write(head + body)
        else:
            transport.writelines((head, body))

    def abort(self) -> None:
        """Gives the request up. The engine sees the connection close, and stops generating."""
        self.reader = None
        if self.transport is not None:
            self.transport.abort()

    def pause(self) -> None:
        if self.usable:
            cast(asyncio.Transport, self.transport).pause_reading()

    def resume(self) -> None:
        if self.usable:
            cast(asyncio.Transport, self.transport).resume_reading()

    # -- from the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        reader, self.reader = self.reader, None
        if reader is None:
            self._pool.forget(self)
        elif self._to_eof and exc is None:
            reader.engine_body(b"", True)
        else:
            reader.engine_lost("closed the connection" if exc is None else "reset the connection", self.began)

    def data_received(self, data: bytes) -> None:
        reader = self.reader
        if reader is None:  # nothing was asked: whatever this is, the connection is of no more use
            self.abort()
            return
        self.began = True
        if self._head is None:
            self._unfinished += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self._done:
                self._fail("sent an answer that is not valid HTTP")
                return
            self._to_eof = True  # bytes behind a complete answer: the answer stands, the connection does not
        head = self._head
        if self._unfinished > MAX_HEAD_BYTES and self._too_large():
            self._fail("sent a head that is too large")
            return
        if head is None:
            return
        if self._head_due:
            self._head_due = False
            self._unfinished = 0
            reader.engine_head(head)
            if self.reader is not reader:  # the reader gave the request up
                return
        done = self._done
        if self._body or done:
            body = self._body
            joined = body[0] if len(body) == 1 else b"".join(body)
            body.clear()
            if done:
                self._release()
            reader.engine_body(joined, done)

    def _too_large(self) -> bool:
        """Whether the head is, and not just what came with it."""
        return self._head is None or sum(len(name) + len(value) for name, value in self._headers) > MAX_HEAD_BYTES

    def _fail(self, why: str) -> None:
        reader = self.reader
        self.abort()
        if reader is not None:
            reader.engine_lost(why, True)

    def _release(self) -> None:
        self.reader = None
        if self._to_eof or not self._keep or not self.usable:
            if self.transport is not None:
                self.transport.close()
            return
        self._reset()
        self.used = True
        self._pool.put(self)

    # -- from the parser

    def on_message_begin(self) -> None:
        if self._done:
            self._to_eof = True  # a second answer to one question

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is None:  # trailers are dropped: no client of these APIs reads them
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._done:
            return
        status = self._parser.get_status_code()
        if status < 100:
            raise ValueError(f"status {status}")
        if status < 200:  # an interim answer; the final one follows
            self._headers = []
            return
        self._head = head = AnswerHead(
            status, self._headers
        )  # its ValueError is to the parser's caller like any bad answer
        self._to_eof = not head.chunked and head.length is None
        self._head_due = True

    def on_body(self, data: bytes) -> None:
        if not self._done:
            self._body.append(data)

    def on_message_complete(self) -> None:
        if self._head is not None:
            self._done = True
            self._keep = self._parser.should_keep_alive()  # llhttp forgets it when it begins the next message


class EnginePool:
    """Connections to one engine. The last used is taken first, so that a quiet time lets the others go."""

    __slots__ = ("_host", "_idle", "_port", "_ssl", "host_header")

    def __init__(self, host: str, port: int, tls: bool = False) -> None:
        self._host, self._port = host, port
        self._ssl = ssl.create_default_context() if tls else None
        self._idle: list[EngineConnection] = []
        self.host_header = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode("ascii")

    def take(self) -> EngineConnection | None:
        """A connection that waits, or None."""
        idle, now = self._idle, monotonic()
        while idle:
            connection = idle.pop()
            if connection.usable and now - connection.idle_since < IDLE_SECONDS:
                return connection
            connection.abort()
        return None

    async def dial(self, within: float) -> EngineConnection:
        """A new connection; raises OSError (TimeoutError included) where there is none `within` seconds."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(within):
            _, connection = await loop.create_connection(
                lambda: EngineConnection(self), self._host, self._port, ssl=self._ssl
            )
        return connection

    def put(self, connection: EngineConnection) -> None:
        """Takes back a connection whose answer is complete."""
        if len(self._idle) >= MAX_IDLE and connection.transport is not None:
            connection.transport.close()
            return
        connection.idle_since = monotonic()
        self._idle.append(connection)

    def forget(self, connection: EngineConnection) -> None:
        """Drops a connection that ended while it waited."""
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Closes what waits."""
        while self._idle:
            self._idle.pop().abort()
