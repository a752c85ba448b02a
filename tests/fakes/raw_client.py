"""A client that is nothing but a socket: any bytes, cut anywhere, half-closed, reset, or not read at all.

async with await RawClient.connect(port) as client:
    await client.send(post("/v1/completions", b"{}"), splits=[5, 40])
    answer = await client.read_response()
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from tests.fakes import wire
from tests.fakes.connection import RESET
from tests.fakes.ports import LOOPBACK


def post(path: str, body: bytes, headers: Iterable[tuple[str, str]] = (), host: str = "test") -> bytes:
    """A POST with Content-Length, as bytes."""
    extra = "".join(f"{k}: {v}\r\n" for k, v in headers)
    top = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n{extra}content-length: {len(body)}"
    )
    return f"{top}\r\n\r\n".encode("latin-1") + body


def get(path: str, headers: Iterable[tuple[str, str]] = (), host: str = "test") -> bytes:
    extra = "".join(f"{k}: {v}\r\n" for k, v in headers)
    return f"GET {path} HTTP/1.1\r\nhost: {host}\r\n{extra}\r\n".encode("latin-1")


@dataclass
class Response:
    """`complete` is whether the framing says so: a body that runs to EOF is complete by EOF, never by a reset."""

    status: int
    headers: wire.Headers
    head: bytes
    raw: bytes  # head and body as they came
    body: bytes  # without the chunked coding
    chunks: list[bytes]  # of the chunked coding
    trailers: wire.Headers
    complete: bool
    end: str  # "message", "eof" or "reset": what ended the reading
    interim: list[int] = field(default_factory=list)  # 1xx that came before

    def header(self, name: str) -> str | None:
        found = wire.values(self.headers, name)
        return found[0] if found else None

    @property
    def events(self) -> list[bytes]:
        """The data of each complete SSE event (LF or CRLF); an unfinished one at the end is left out."""
        blocks = self.body.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]
        return [b"\n".join(x[5:].removeprefix(b" ") for x in b.split(b"\n") if x.startswith(b"data:")) for b in blocks]


class RawClient:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self.end: str | None = None  # "eof" or "reset" once the peer is gone

    @classmethod
    async def connect(cls, port: int, receive_buffer: int | None = None) -> Self:
        """`receive_buffer` bytes bounds what the kernel takes in while nobody reads."""
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await asyncio.get_running_loop().sock_connect(sock, (LOOPBACK, port))
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    async def send(self, data: bytes, splits: Iterable[int] = (), pause: float = 0.002) -> None:
        """`data` cut before the given offsets, `pause` seconds between pieces."""
        loop = asyncio.get_running_loop()
        for number, piece in enumerate(wire.pieces(data, splits)):
            if number:
                await asyncio.sleep(pause)
            await loop.sock_sendall(self._sock, piece)

    async def read_some(self, timeout: float = 5.0) -> bytes:  # noqa: ASYNC109
        """What is there next; empty once the peer is gone, see `end`."""
        if self._buffer:
            data = bytes(self._buffer)
            self._buffer.clear()
            return data
        async with asyncio.timeout(timeout):
            return await self._receive()

    async def read_until(self, mark: bytes, timeout: float = 5.0) -> bytes:  # noqa: ASYNC109
        """Everything through `mark`; what follows stays for the next read. EOFError where the peer leaves before."""
        async with asyncio.timeout(timeout):
            while (at := self._buffer.find(mark)) < 0:
                if not await self._fill():
                    raise EOFError(f"{self.end} before {mark!r}; had {bytes(self._buffer[-200:])!r}")
        return self._take(at + len(mark))

    async def read_to_end(self, timeout: float = 5.0) -> bytes:  # noqa: ASYNC109
        """Everything until the peer closes or resets; `end` says which."""
        async with asyncio.timeout(timeout):
            while await self._fill():
                pass
        return self._take(len(self._buffer))

    async def read_response(self, timeout: float = 5.0, method: str = "POST") -> Response:  # noqa: ASYNC109
        """The next final response. EOFError where the peer leaves before its head is complete."""
        async with asyncio.timeout(timeout):
            interim: list[int] = []
            while True:
                head = await self.read_until(b"\r\n\r\n", timeout)
                start, headers = wire.parse_head(head)
                version, _, rest = start.partition(" ")
                if version not in ("HTTP/1.1", "HTTP/1.0"):
                    raise wire.FramingError(f"no HTTP: {start[:80]!r}")
                code = int(rest[:3])
                if code >= 200:
                    break
                interim.append(code)
            length = 0 if method == "HEAD" or code in (204, 304) else wire.body_length(headers)
            dechunker = wire.Dechunker()
            if length == "chunked":
                raw = await self._read_chunked(dechunker)
                body, complete = bytes(dechunker.body), dechunker.done
            elif isinstance(length, int):
                while len(self._buffer) < length and await self._fill():
                    pass
                raw = body = self._take(length)
                complete = len(body) == length
            else:
                raw = body = await self.read_to_end(timeout)
                complete = self.end == "eof"
        end = "message" if complete and length is not None else str(self.end)
        return Response(
            code, headers, head, head + raw, body, dechunker.chunks, dechunker.trailers, complete, end, interim
        )

    async def _read_chunked(self, dechunker: wire.Dechunker) -> bytes:
        raw = bytearray()
        while not dechunker.done:
            if not self._buffer and not await self._fill():
                break
            used = dechunker.feed(bytes(self._buffer))
            raw += self._take(used)
        return bytes(raw)

    def half_close(self) -> None:
        """FIN: no more requests from here, still reading."""
        self._sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """RST, as from a client that was killed."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._sock.close()

    def close(self) -> None:
        self._sock.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    async def _fill(self) -> bool:
        data = await self._receive()
        self._buffer += data
        return bool(data)

    async def _receive(self) -> bytes:
        if self.end is not None:
            return b""
        try:
            data = await asyncio.get_running_loop().sock_recv(self._sock, 65536)
        except ConnectionResetError:
            self.end = "reset"
            return b""
        if not data:
            self.end = "eof"
        return data

    def _take(self, size: int) -> bytes:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data
