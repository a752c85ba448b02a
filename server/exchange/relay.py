"""The ways in which an engine's answer goes on to the client: held back until it is whole, as it comes, or by events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import monotonic

from kvgate.errors import Dialect, Problem
from server.exchange.answer import AnswerWriter
from server.exchange.http1 import Header
from server.exchange.sse import EventBuffer, events
from server.usage import USAGE, Usage, has_content, read_usage, without_usage


class Relay(ABC):
    """One answer on its way. `first_content_at`: monotonic seconds of a stream's first generated content, 0 before."""

    __slots__ = ("_usage", "_usage_in", "_writer", "first_content_at", "output_at_least")

    def __init__(self, writer: AnswerWriter) -> None:
        self._writer = writer
        self._usage_in = b""  # the last bytes that brought usage, until they are read
        self._usage: Usage | None = None
        self.first_content_at = 0.0
        self.output_at_least = 0  # tokens that came, as far as events tell

    @abstractmethod
    def feed(self, data: bytes, last: bool) -> None:
        """Body bytes as they came; `last` ends the answer. Raises OverflowError for an event without end."""

    def usage(self) -> Usage | None:
        """What the engine has said of tokens so far."""
        if self._usage_in:
            self._usage, self._usage_in = read_usage(self._usage_in), b""
        return self._usage

    def cut(self, problem: Problem, dialect: Dialect, request_id: str) -> None:
        """Ends an answer that has begun and will not be whole: the body stays short of its length."""
        self._writer.keep_alive = False


class PassedAnswer(Relay):
    """As it comes."""

    __slots__ = ()

    def __init__(
        self, writer: AnswerWriter, status: int, headers: list[Header], lines: list[bytes], length: int | None
    ) -> None:
        super().__init__(writer)
        writer.head(status, headers, lines, length)

    def feed(self, data: bytes, last: bool) -> None:
        if USAGE.search(data):
            self._usage_in = data
        self._writer.write(data, last)


class HeldAnswer(Relay):
    """Held back until it is whole, so that its head can tell what came from the cache; passed on once it exceeds `limit`."""

    __slots__ = ("_headers", "_held", "_limit", "_lines", "_passing", "_status")

    def __init__(
        self, writer: AnswerWriter, status: int, headers: list[Header], lines: list[bytes], limit: int
    ) -> None:
        super().__init__(writer)
        self._status, self._headers, self._lines = status, headers, lines
        self._limit = limit
        self._held: list[bytes] = []
        self._passing: PassedAnswer | None = None

    def feed(self, data: bytes, last: bool) -> None:
        if self._passing is not None:
            self._passing.feed(data, last)
            return
        self._held.append(data)
        if last:
            self._finish(data if len(self._held) == 1 else b"".join(self._held))
        elif sum(map(len, self._held)) > self._limit:
            self._passing = PassedAnswer(self._writer, self._status, self._headers, self._lines, None)
            self._passing.feed(b"".join(self._held), False)
            self._held.clear()

    def _finish(self, body: bytes) -> None:
        self._usage_in = body
        usage = self.usage()
        if usage is not None and usage.cached is not None:
            self._lines.append(b"x-kvgate-delivered-tokens: %d\r\n" % usage.cached)
        self._writer.head(self._status, self._headers, self._lines, len(body))
        self._writer.write(body, True)
        self._held.clear()

    def usage(self) -> Usage | None:
        return self._passing.usage() if self._passing is not None else super().usage()


class EventStream(Relay):
    """Event by event, so that an error can be appended where one ends."""

    __slots__ = ("_buffer", "_hides_usage")

    def __init__(
        self, writer: AnswerWriter, status: int, headers: list[Header], lines: list[bytes], hides_usage: bool
    ) -> None:
        super().__init__(writer)
        self._buffer = EventBuffer()
        self._hides_usage = hides_usage
        writer.head(status, headers, lines, None)

    def feed(self, data: bytes, last: bool) -> None:
        whole = self._buffer.take(data)
        if whole:
            self._look_at(whole)
            if self._hides_usage:
                whole = without_usage(whole)
        if last:
            whole += self._buffer.rest  # an end without its empty line; the bytes are the engine's
        if whole or last:
            self._writer.write(whole, last)

    def _look_at(self, whole: bytes) -> None:
        if USAGE.search(whole):
            self._usage_in = whole
        if self.output_at_least:
            self.output_at_least += 1 + whole.count(b"\ndata:", 1)
        elif contents := sum(map(has_content, events(whole))):
            self.output_at_least = contents
            self.first_content_at = monotonic()

    def cut(self, problem: Problem, dialect: Dialect, request_id: str) -> None:
        """With an error event, and without the end of the body: it never looks complete."""
        self._writer.keep_alive = False
        self._writer.write(problem.event(dialect, request_id), last=False)


def relay_for(
    writer: AnswerWriter,
    status: int,
    headers: list[Header],
    lines: list[bytes],
    length: int | None,
    *,
    hides_usage: bool,
    max_held: int,
) -> Relay:
    """The way for an answer with this head. `length` is its body's, None where only its end will tell."""
    for name, value in headers:
        if name == b"content-type" and value.startswith(b"text/event-stream"):
            return EventStream(writer, status, headers, lines, hides_usage)
    if length is not None and length > max_held:
        return PassedAnswer(writer, status, headers, lines, length)
    return HeldAnswer(writer, status, headers, lines, max_held)
