"""The client's side of one answer: head and framing, written once each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kvgate.errors import Dialect, Problem
from server.exchange.http1 import BODILESS, LAST_CHUNK, STATUS_LINE, AnswerHead, chunk, response_head


class AnswerWriter:
    """Writes one answer to a client. `started` once any byte of it is out, and then it cannot become another answer."""

    __slots__ = ("_bodiless", "_chunked", "_head", "_http10", "_transport", "keep_alive", "started", "written")

    def __init__(self, transport: asyncio.Transport, http10: bool, keep_alive: bool) -> None:
        self._transport = transport
        self._http10 = http10
        self._head = b""
        self._chunked = False
        self._bodiless = False
        self.keep_alive = keep_alive
        self.started = False
        self.written = 0  # bytes, framing included

    @property
    def decided(self) -> bool:
        """Whether the head is made, and so whether the connection goes on is said."""
        return self.started or bool(self._head)

    def head(self, head: AnswerHead, extra: list[bytes], length: int | None) -> None:
        """Sets the head of an answer of `length` bytes; None where only its end will tell. Sent with the first bytes."""
        if (
            head.status in BODILESS
        ):  # it ends with its head, whatever its framing says; bytes behind that were the next answer's
            self._bodiless = True
        elif length is not None:
            extra.append(b"content-length: %d\r\n" % length)
        elif self._http10:
            self.keep_alive = False  # such a client sees the end when the connection closes
        else:
            self._chunked = True
            extra.append(b"transfer-encoding: chunked\r\n")
        self._head = response_head(head, extra, self.keep_alive)

    def write(self, data: bytes, last: bool) -> None:
        """Body bytes, framed; `last` ends the answer."""
        if self._bodiless:
            data = b""
        elif self._chunked:
            data = chunk(data) if data else b""
            if last:
                data += LAST_CHUNK
        if not self.started:
            self.started = True
            data, self._head = self._head + data, b""
        if data:
            self.written += len(data)
            self._transport.write(data)

    def problem(self, problem: Problem, dialect: Dialect, request_id: bytes, extra: Iterable[bytes] = ()) -> None:
        """The gateway's own answer, whole, with `extra` header lines."""
        body = problem.body(dialect, request_id.decode("ascii"))
        lines = [
            STATUS_LINE[problem.status],
            b"content-type: application/json\r\nx-request-id: ",
            request_id,
            b"\r\ncontent-length: %d\r\n" % len(body),
        ]
        if dialect == "anthropic":
            lines += (b"request-id: ", request_id, b"\r\n")
        if problem.reason is not None:
            lines.append(b"x-kvgate-reason: %b\r\n" % problem.reason.encode("ascii"))
        if problem.retry_after is not None:
            lines.append(b"retry-after: %d\r\n" % problem.retry_after)
        lines += extra
        lines.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        lines.append(body)
        self.started = True
        whole = b"".join(lines)
        self.written = len(whole)
        self._transport.write(whole)
