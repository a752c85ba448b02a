"""The ways in which an engine's answer goes on to the client: held back until it is whole, as it comes, or by events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import monotonic

from kvgate.errors import Dialect, Problem
from server.exchange.answer import AnswerWriter
from server.exchange.http1 import AnswerHead
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

    def _pass(self, data: bytes, last: bool) -> None:
        """Bytes of an answer that is none of events go on, and are looked through for its usage."""
        if USAGE.search(data):
            self._usage_in = data
        self._writer.write(data, last)

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

    def __init__(self, writer: AnswerWriter, head: AnswerHead, lines: list[bytes], length: int | None) -> None:
        super().__init__(writer)
        writer.head(head, lines, length)

    def feed(self, data: bytes, last: bool) -> None:
        self._pass(data, last)


class HeldAnswer(Relay):
    """Held back until it is whole, so that its head can tell what came from the cache; passed on once it exceeds `limit`."""

    __slots__ = ("_head", "_held", "_limit", "_lines", "_passing")

    def __init__(self, writer: AnswerWriter, head: AnswerHead, lines: list[bytes], limit: int) -> None:
        super().__init__(writer)
        self._head, self._lines = head, lines
        self._limit = limit
        self._held: list[bytes] = []
        self._passing = False

    def feed(self, data: bytes, last: bool) -> None:
        if self._passing:
            self._pass(data, last)
        elif last and not self._held:  # nearly always: it came in one piece
            self._finish(data)
        else:
            self._hold(data, last)

    def _hold(self, data: bytes, last: bool) -> None:
        self._held.append(data)
        if last:
            self._finish(b"".join(self._held))
        elif sum(map(len, self._held)) > self._limit:
            self._passing = True
            self._writer.head(self._head, self._lines, None)
            self._pass(b"".join(self._held), False)
            self._held.clear()

    def _finish(self, body: bytes) -> None:
        self._held.clear()
        self._usage_in = body
        usage = self.usage()
        if usage is not None and usage.cached is not None:
            self._lines.append(b"x-kvgate-delivered-tokens: %d\r\n" % usage.cached)
        self._writer.head(self._head, self._lines, len(body))
        self._writer.write(body, True)


class EventStream(Relay):
    """Event by event, so that an error can be appended where one ends."""

    __slots__ = ("_buffer", "_hides_usage")

    def __init__(self, writer: AnswerWriter, head: AnswerHead, lines: list[bytes], hides_usage: bool) -> None:
        super().__init__(writer)
        self._buffer = EventBuffer()
        self._hides_usage = hides_usage
        writer.head(head, lines, None)

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


def relay_for(writer: AnswerWriter, head: AnswerHead, lines: list[bytes], *, hides_usage: bool, max_held: int) -> Relay:
    """The way for an answer with this head. `lines` are further ones for its client."""
    if head.events:
        return EventStream(writer, head, lines, hides_usage)
    if head.length is not None and head.length > max_held:
        return PassedAnswer(writer, head, lines, head.length)
    return HeldAnswer(writer, head, lines, max_held)
