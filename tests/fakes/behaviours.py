"""Ready-made behaviours of FakeEngine: whole answers, streams, faults of the wire.

    engine.script(Stream(stop_after=2, stop="reset"))       # two events, then RST
    engine.script(status(503, headers=[("retry-after", "1")]), close_before_answer())
    engine.always(gated(event, then=Whole()))

Each is an `async (request, writer) -> None`. Times are seconds, sizes bytes. Faults that never end (stalls, endless
streams) last until the peer leaves or the engine stops.
"""

from __future__ import annotations

import asyncio
import gzip as gz
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.fakes import answers, wire
from tests.fakes.connection import Received, Writer

Behaviour = Callable[[Received, Writer], Awaitable[None]]
HeaderList = Iterable[tuple[str, str]]
Framing = Literal["chunked", "length", "eof", "http10"]
EVENT_STREAM = ("content-type", "text/event-stream; charset=utf-8")
JSON = ("content-type", "application/json")
FOREVER = 3600.0  # longer than any test


async def _forever() -> None:
    await asyncio.sleep(FOREVER)


@dataclass
class Whole:
    """A complete non-streamed answer. `body` replaces the completion; `cached_tokens` None leaves details null."""

    body: bytes | None = None
    texts: list[str] = field(default_factory=lambda: ["Hello", " wor", "ld"])
    model: str = "tiny"  # where the request names none
    prompt_tokens: int = 64
    cached_tokens: int | None = 32
    usage: Literal["full", "null"] = "full"
    status: int = 200
    headers: list[tuple[str, str]] = field(default_factory=list)
    framing: Framing = "length"
    close: bool = False  # says Connection: close, and closes
    gzip: bool = False
    trailers: list[tuple[str, str]] = field(default_factory=list)  # chunked framing only
    after: bytes = b""  # sent in the same write, after the end of the message

    def content(self, request: Received) -> bytes:
        if self.body is not None:
            return self.body
        counts = answers.usage(self.prompt_tokens, len(self.texts), self.cached_tokens)
        path, model = request.path.partition("?")[0], str(_asked(request).get("model", self.model))
        return answers.completion_body(path, model, self.texts, counts if self.usage == "full" else None)

    async def __call__(self, request: Received, writer: Writer) -> None:
        body = self.content(request)
        headers = [("server", "uvicorn"), JSON, *self.headers]
        if self.gzip:
            body = gz.compress(body, mtime=0)
            headers.append(("content-encoding", "gzip"))
        if self.framing == "length":
            headers.append(("content-length", str(len(body))))
        elif self.framing == "chunked":
            headers.append(("transfer-encoding", "chunked"))
            end = "".join(f"{k}: {v}\r\n" for k, v in self.trailers).encode("latin-1")
            body = wire.chunk(body) + b"0\r\n" + end + b"\r\n"
        if self.close:
            headers.append(("connection", "close"))
        version = "1.0" if self.framing == "http10" else "1.1"
        await writer.send(wire.head(self.status, headers, version) + body + self.after)
        if self.close or self.framing in ("eof", "http10"):
            writer.close()


@dataclass
class Stream:
    """An SSE answer. With no fault set it is what vLLM sends: chunked, one event to a chunk, usage if asked for.

    `stop_after` counts events; then `stop` says what happens:
    "stall" nothing more, "cut" FIN at the border, "cut_event" FIN inside the next event (the chunk itself is whole),
    "cut_chunk" FIN inside the next chunk, "reset" RST, "end" a correct end of the message without [DONE].
    """

    texts: list[str] = field(default_factory=lambda: ["Hello", " wor", "ld"])
    model: str = "tiny"  # where the request names none
    prompt_tokens: int = 64
    cached_tokens: int | None = 32
    usage: Literal["asked", "always", "null", "never"] = "asked"
    headers: list[tuple[str, str]] = field(default_factory=list)
    framing: Framing = "chunked"
    newline: bytes = b"\n"
    events_per_chunk: int = 1
    pause: float = 0.0  # before each chunk but the first
    done: bool = True  # ends with data: [DONE]
    close: bool = False
    stop_after: int | None = None
    stop: Literal["stall", "cut", "cut_event", "cut_chunk", "reset", "end"] = "cut"

    def events(self, request: Received) -> list[bytes]:
        """Every event as bytes, its empty line included."""
        body = _asked(request)
        asked = (body.get("stream_options") or {}).get("include_usage")
        counts = answers.usage(self.prompt_tokens, len(self.texts), self.cached_tokens)
        final = counts if self.usage == "always" or (self.usage == "asked" and asked) else None
        path, model = request.path.partition("?")[0], str(body.get("model", self.model))
        payloads = answers.stream_payloads(path, model, self.texts, final)
        if self.usage == "null":
            payloads.append(payloads[-1][:-1] + b',"usage":null}')
        if self.done:
            payloads.append(b"[DONE]")
        return [b"data: " + p + self.newline * 2 for p in payloads]

    async def __call__(self, request: Received, writer: Writer) -> None:
        events = self.events(request)
        kept = events if self.stop_after is None else events[: self.stop_after]
        headers = [("server", "uvicorn"), EVENT_STREAM, *self.headers]
        if self.framing == "chunked":
            headers.append(("transfer-encoding", "chunked"))
        elif self.framing == "length":
            headers.append(("content-length", str(len(b"".join(events)))))
        if self.close:
            headers.append(("connection", "close"))
        await writer.send(wire.head(200, headers, "1.0" if self.framing == "http10" else "1.1"))
        for at in range(0, len(kept), self.events_per_chunk):
            if at and self.pause:
                await asyncio.sleep(self.pause)
            await writer.send(self._framed(b"".join(kept[at : at + self.events_per_chunk])))
        if self.stop_after is not None and self.stop != "end":
            await self._stop(writer, events[self.stop_after : self.stop_after + 1])
            return
        if self.framing == "chunked":
            await writer.send(wire.LAST_CHUNK)
        if self.close or self.framing in ("eof", "http10"):
            writer.close()

    def _framed(self, data: bytes) -> bytes:
        return wire.chunk(data) if self.framing == "chunked" else data

    async def _stop(self, writer: Writer, following: list[bytes]) -> None:
        event = following[0] if following else b"data: {}" + self.newline * 2
        if self.stop == "stall":
            await _forever()
        elif self.stop == "reset":
            await asyncio.sleep(0.02)  # a reset overtakes bytes that the peer has not read yet
            writer.reset()
            return
        elif self.stop == "cut_event":
            await writer.send(self._framed(event[: len(event) // 2]))
        elif self.stop == "cut_chunk":
            framed = self._framed(event)
            await writer.send(framed[: len(framed) // 2])
        writer.close()


def _asked(request: Received) -> dict[str, Any]:
    try:
        asked = json.loads(request.body)
    except ValueError:
        return {}
    return asked if isinstance(asked, dict) else {}


def status(code: int, body: bytes | None = None, headers: HeaderList = ()) -> Behaviour:
    """An answer with this status; the body is vLLM's error shape unless given."""
    return Whole(answers.error(code, "scripted") if body is None else body, status=code, headers=list(headers))


def large(size: int) -> Behaviour:
    """A non-streamed JSON answer of exactly `size` bytes (at least 16)."""
    return Whole(b'{"padding":"' + b"x" * (size - 14) + b'"}')


def raw(
    data: bytes, splits: Iterable[int] = (), pause: float = 0.002, then: Literal["keep", "close", "reset"] = "keep"
) -> Behaviour:
    """These bytes and nothing else, cut before the given offsets, `pause` between pieces."""

    async def behaviour(request: Received, writer: Writer) -> None:
        await writer.send_split(data, tuple(splits), pause)
        if then == "close":
            writer.close()
        elif then == "reset":
            await asyncio.sleep(0.02)
            writer.reset()

    return behaviour


def garbage() -> Behaviour:
    """Bytes that are no HTTP."""
    return raw(b"\x00\xff\x16\x03\x01 this is not HTTP\r\n\r\n", then="close")


def huge_headers(size: int) -> Behaviour:
    """A good answer whose head carries one header value of `size` bytes."""
    return Whole(headers=[("x-huge", "h" * size)])


def close_before_answer() -> Behaviour:
    """FIN once the request is complete, without a byte."""

    async def behaviour(request: Received, writer: Writer) -> None:
        writer.close()

    return behaviour


def reset() -> Behaviour:
    """RST once the request is complete, without a byte."""

    async def behaviour(request: Received, writer: Writer) -> None:
        writer.reset()

    return behaviour


def stall_before_head() -> Behaviour:
    """Never a byte."""

    async def behaviour(request: Received, writer: Writer) -> None:
        await _forever()

    return behaviour


def stall_after_head(length: int = 100) -> Behaviour:
    """A head that promises `length` bytes of JSON, and never one. For a stream: Stream(stop_after=0, stop="stall")."""

    async def behaviour(request: Received, writer: Writer) -> None:
        await writer.send(answers.json_head(length))
        await _forever()

    return behaviour


def cut_body(sent: int, length: int, *, rst: bool = False) -> Behaviour:
    """A non-streamed answer of `length` bytes that ends after `sent` of them."""
    return raw(answers.json_head(length) + b"x" * sent, then="reset" if rst else "close")


def interim(*codes: int, then: Behaviour | None = None, pause: float = 0.0) -> Behaviour:
    """1xx answers (100, 102, 103), then the final one."""

    async def behaviour(request: Received, writer: Writer) -> None:
        for code in codes:
            await writer.send(wire.head(code, [("link", "</x>; rel=preload")] if code == 103 else ()))
            await asyncio.sleep(pause)
        await (then or Whole())(request, writer)

    return behaviour


def gated(gate: asyncio.Event, then: Behaviour | None = None) -> Behaviour:
    """Answers once `gate` is set."""

    async def behaviour(request: Received, writer: Writer) -> None:
        await gate.wait()
        await (then or Whole())(request, writer)

    return behaviour


def endless(pause: float = 0.001, text_bytes: int = 16) -> Behaviour:
    """A stream without end. `pause` 0 floods: with a reader that stops, `request.sent` shows how much was swallowed."""

    async def behaviour(request: Received, writer: Writer) -> None:
        await writer.send(wire.head(200, [EVENT_STREAM, ("transfer-encoding", "chunked")]))
        role, text, *_ = answers.stream_payloads(answers.CHAT, "tiny", ["e" * text_bytes], None)
        await writer.send(wire.chunk(b"data: " + role + b"\n\n"))
        event = wire.chunk(b"data: " + text + b"\n\n")
        while request.open:
            await writer.send(event)
            await asyncio.sleep(pause)

    return behaviour


@dataclass
class Early:
    """Answers when the head has come, without waiting for the body; `read` False also stops taking the body."""

    then: Behaviour
    read: bool = True
    early: bool = True

    async def __call__(self, request: Received, writer: Writer) -> None:
        if not self.read:
            writer.pause_reading()
        await self.then(request, writer)


def early(then: Behaviour, *, read: bool = True) -> Behaviour:
    return Early(then, read)


def done_in_content() -> Behaviour:
    """A stream whose text holds `data: [DONE]`, with newlines around it, before it goes on."""
    return Stream(["see: ", "\n\ndata: [DONE]\n\n", " and on"], usage="always")
