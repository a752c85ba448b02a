"""The engine's end of one connection: takes requests off the wire, runs their behaviours one after the other."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from tests.fakes import wire

if TYPE_CHECKING:
    from tests.fakes.engine import Behaviour, FakeEngine

RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close sends RST


@dataclass(eq=False)
class Received:
    """One request as it came. `raw_body` keeps a chunked upload's framing; `body` is without it."""

    method: str
    path: str
    version: str
    headers: wire.Headers
    head: bytes
    connection: int
    wire_body: bytearray = field(default_factory=bytearray)
    decoded_body: bytearray | None = None  # of a chunked upload
    sent: int = 0  # bytes of the answer given to the transport
    aborted: asyncio.Event = field(default_factory=asyncio.Event)  # the peer closed before the answer was complete
    answered: asyncio.Event = field(default_factory=asyncio.Event)  # the behaviour returned
    open: bool = True  # until it is answered or its connection is gone, whoever closed it

    @property
    def body(self) -> bytes:
        return bytes(self.wire_body if self.decoded_body is None else self.decoded_body)

    @property
    def raw_body(self) -> bytes:
        return bytes(self.wire_body)

    def header(self, name: str) -> str | None:
        found = wire.values(self.headers, name)
        return found[0] if found else None


class Writer:
    """What a behaviour answers with. Each `send` is one write to the socket, and waits while the peer does not read."""

    def __init__(self, connection: Connection, request: Received) -> None:
        self._connection = connection
        self._request = request

    async def send(self, data: bytes) -> None:
        self._request.sent += len(data)
        self._connection.transport.write(data)
        await self._connection.writable.wait()

    async def send_split(self, data: bytes, splits: tuple[int, ...] = (), pause: float = 0.002) -> None:
        """`data` cut at the given offsets; `pause` seconds between pieces let the peer read each by itself."""
        for number, piece in enumerate(wire.pieces(data, splits)):
            if number:
                await asyncio.sleep(pause)
            await self.send(piece)

    def close(self) -> None:
        """FIN after what was sent. Not an abort by the peer."""
        self._connection.finish(reset=False)

    def reset(self) -> None:
        """RST. Bytes that the peer has not read yet may be lost with it."""
        self._connection.finish(reset=True)

    def pause_reading(self) -> None:
        """Stops taking bytes off the socket, so that the peer's writes fill up."""
        self._connection.transport.pause_reading()


class Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._buffer = bytearray()
        self._request: Received | None = None  # whose body is being received
        self._behaviour: Behaviour | None = None
        self._dechunker: wire.Dechunker | None = None
        self._left = 0
        self._answering: tuple[Received, asyncio.Task[None]] | None = None
        self._ours = False  # this end closed
        self.writable = asyncio.Event()
        self.writable.set()

    @property
    def idle(self) -> bool:
        return self._answering is None and self._request is None and not self._buffer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self._id = self._engine.connected(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._take()

    def _take(self) -> None:
        """As much as the buffer allows: heads and bodies; a pipelined request waits for the answer before it."""
        if self._request is None:
            if self._answering is not None:
                return
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[: end + 4])
            del self._buffer[: end + 4]
            self._begin(head)
        request = self._request
        assert request is not None
        if self._take_body(request):
            behaviour, self._request, self._behaviour = self._behaviour, None, None
            if behaviour is not None:
                self._answer(request, behaviour)

    def _begin(self, head: bytes) -> None:
        start, headers = wire.parse_head(head)
        method, path, version = start.split(" ")
        self._request = request = Received(method, path, version, headers, head, self._id)
        length = wire.body_length(headers)
        self._dechunker = wire.Dechunker() if length == "chunked" else None
        request.decoded_body = self._dechunker.body if self._dechunker else None
        self._left = length if isinstance(length, int) else 0
        self._engine.requests.append(request)
        self._behaviour = self._engine.behaviour_for(method, path)
        if getattr(self._behaviour, "early", False):
            behaviour, self._behaviour = self._behaviour, None
            self._answer(request, behaviour)
        elif (request.header("expect") or "").lower() == "100-continue":
            self.transport.write(wire.head(100))

    def _take_body(self, request: Received) -> bool:
        """Moves body bytes from the buffer to the request; True once the body is complete."""
        if self._dechunker is not None:
            used = self._dechunker.feed(bytes(self._buffer))
        else:
            used = min(self._left, len(self._buffer))
            self._left -= used
        request.wire_body += self._buffer[:used]
        del self._buffer[:used]
        return self._dechunker.done if self._dechunker is not None else self._left == 0

    def _answer(self, request: Received, behaviour: Behaviour) -> None:
        task = asyncio.ensure_future(self._run(request, behaviour))
        self._answering = request, task
        self._engine.changed()

    async def _run(self, request: Received, behaviour: Behaviour) -> None:
        try:
            await behaviour(request, Writer(self, request))
        except Exception as error:  # noqa: BLE001 - kept, and raised when the test leaves the engine
            self._engine.failures.append(error)
            self.transport.abort()
        if not request.aborted.is_set():
            request.answered.set()
        request.open = False
        self._answering = None
        self._engine.changed()
        if not self.transport.is_closing():
            self._take()

    def finish(self, *, reset: bool) -> None:
        self._ours = True
        if reset:
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.transport.abort()
        else:
            self.transport.close()

    def drop(self) -> None:
        """The engine dies: whatever is being answered ends here."""
        self._ours = True
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        unfinished = [self._request] if self._request is not None else []
        if self._answering is not None:
            request, task = self._answering
            unfinished.append(request)
            task.cancel()
        for request in unfinished:
            request.open = False
            if not self._ours:
                request.aborted.set()
        self.writable.set()
        self._engine.disconnected(self)

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()
