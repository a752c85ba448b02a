"""A gateway and an engine for fuzz tests: any bytes in, split anywhere, and everything that came of it out.

Both live for a whole module, in a loop of their own that runs while an example does. No example waits for a time: the
gateway's connection is watched until it has read every piece and has nothing left to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import re
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import h11
import pytest
import uvloop

from server.admission import Admission, admit
from server.exchange.exchange import Exchange
from server.exchange.protocol import ClientConnection
from server.models import Aliases
from server.routes import ROUTES
from tests.fakes import behaviours
from tests.fakes.connection import Received, Writer
from tests.fakes.engine import FakeEngine
from tests.fakes.raw_client import RawClient, post
from tests.server import strict_http
from tests.server.running import RunningGateway, running_gateway

CHAT = "/v1/chat/completions"
PLAIN = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'
PROBE = "probe"  # the id of the healthy request behind each example
MAX_BODY_BYTES = 5000
_ABSOLUTE = re.compile(rb"[A-Za-z][A-Za-z0-9+.\-]*://[^/?#]*")


class Watched(ClientConnection):
    """Counts the bytes that the gateway has read. An upgrade that is not taken is read twice, and counted once."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.seen = 0
        self._inside = False

    def data_received(self, data: bytes) -> None:
        if self._inside:
            super().data_received(data)
            return
        self.seen += len(data)
        self._inside = True
        try:
            super().data_received(data)
        finally:
            self._inside = False

    def has_read(self, due: int) -> bool:
        """So many bytes, or as many as it ever will."""
        return self.seen >= due or self.over

    @property
    def over(self) -> bool:
        """Nothing more is read here."""
        return self._discarding or self not in self.gateway.connections or self.transport.is_closing()

    @property
    def rests(self) -> bool:
        """All that could be answered is answered."""
        if self not in self.gateway.connections or self.transport.is_closing():
            return True
        cycle: Any = self.cycle
        if cycle is None or cycle.response_complete:
            return True
        return isinstance(cycle, Exchange) and cycle is self._receiving and cycle is self._answering


@dataclass
class Answer:
    """One response, as h11 reads it. `complete` is what its framing says."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""
    interim: list[int] = field(default_factory=list)
    complete: bool = False

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)


@dataclass
class Outcome:
    """What came of the bytes that a client sent. `closed`: by the gateway, before the client did."""

    raw: bytes
    answers: list[Answer]
    forwarded: list[Received]
    closed: bool


def read_answers(raw: bytes, methods: Iterable[bytes] = ()) -> list[Answer]:
    """`raw` as a sequence of responses to requests with these methods (POST where there are fewer)."""
    asked = iter(methods)
    found: list[Answer] = []
    while raw:
        head = raw.partition(b"\r\n\r\n")[0]
        assert not re.search(rb"(?<!\r)\n|\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", head), (
            head
        )  # h11 lets some through
        client = h11.Connection(h11.CLIENT)
        client.send(h11.Request(method=next(asked, b"POST"), target="/", headers=[("host", "t")]))
        client.send(h11.EndOfMessage())
        client.receive_data(raw)
        interim: list[int] = []
        answer: Answer | None = None
        while True:
            event = client.next_event()
            if isinstance(event, h11.InformationalResponse):
                interim.append(event.status_code)
            elif isinstance(event, h11.Response):
                answer = Answer(event.status_code, list(event.headers.raw_items()), interim=interim)
                answer.headers = [(name.lower(), value) for name, value in answer.headers]
                if answer.status == 204:
                    assert answer.header(b"content-length") is answer.header(b"transfer-encoding") is None
            elif isinstance(event, h11.Data):
                assert answer is not None
                answer.body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert answer is not None
                answer.complete = True
                break
            else:
                assert event is h11.NEED_DATA
                if answer is not None and not any(
                    answer.header(name) for name in (b"content-length", b"transfer-encoding")
                ):
                    answer.complete = True  # up to the end of the connection
                break
        if answer is not None:
            found.append(answer)
        if answer is None or not answer.complete:
            break
        raw = client.trailing_data[0] if event is not h11.NEED_DATA else b""
    return found


class Rig:
    """See the module."""

    def __init__(self, runner: asyncio.Runner, engine: FakeEngine, gateway: RunningGateway) -> None:
        self._runner = runner
        self.engine, self.gateway = engine, gateway
        self.errors: list[str] = []  # logged at ERROR or above

    def send(self, *pieces: bytes, in_turn: bool = False) -> Outcome:
        """Sends the pieces over one connection, each read by the gateway before the next; then a healthy request.

        `in_turn`: each also answered before the next.
        """
        return self._runner.run(self._send(pieces, in_turn))

    async def _send(self, pieces: Iterable[bytes], in_turn: bool) -> Outcome:
        self.engine.requests.clear()
        known = set(self.gateway.gateway.connections)
        async with await RawClient.connect(self.gateway.port) as client:
            await until(lambda: self.gateway.gateway.connections - known)
            (server,) = self.gateway.gateway.connections - known
            assert isinstance(server, Watched)
            for piece in pieces:
                due = server.seen + len(piece)
                with contextlib.suppress(OSError):
                    await client.send(piece)
                await until(functools.partial(server.has_read, due))
                if in_turn:
                    await until(lambda: server.rests)
                if server.over:
                    break
            await until(lambda: server.rests)
            closed = server.over
            with contextlib.suppress(OSError):
                client.half_close()
            raw = await client.read_to_end()
        await self.gateway.idle()
        await self._serves()
        assert self.engine.failures == []
        errors, self.errors[:] = list(self.errors), []
        assert errors == []
        assert b"Traceback" not in raw
        methods = [r.method for r in strict_http.read_requests(b"".join(pieces)).requests]
        forwarded = [r for r in self.engine.posts if r.header("x-request-id") != PROBE]
        return Outcome(raw, read_answers(raw, methods), forwarded, closed)

    async def _serves(self) -> None:
        """(d) of the property: whatever came before, a healthy request is answered."""
        async with await RawClient.connect(self.gateway.port) as client:
            await client.send(post(CHAT, PLAIN, [("x-request-id", PROBE)]))
            answer = await client.read_response()
        assert answer.status == 200, answer.raw


async def until(condition: Callable[[], object]) -> None:
    """Lets the loop turn until it holds."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def echo(request: Received, writer: Writer) -> None:
    """The engine's answer tells what it was asked."""
    await behaviours.Whole(json.dumps({"echo": request.body.hex()}).encode())(request, writer)


class _Errors(logging.Handler):
    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        self._found.append(self.format(record))


@contextlib.contextmanager
def rig() -> Iterator[Rig]:
    """One for a module."""

    @contextlib.asynccontextmanager
    async def parts() -> AsyncIterator[tuple[FakeEngine, RunningGateway]]:
        async with (
            FakeEngine() as engine,
            running_gateway(
                engine.url, max_body_bytes=MAX_BODY_BYTES, health_interval=60.0, scrape_interval=60.0
            ) as gateway,
        ):
            yield engine, gateway

    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        patch.setattr("server.run.ClientConnection", Watched)
        stack = contextlib.AsyncExitStack()
        engine, gateway = runner.run(_enter(stack, parts()))
        made = Rig(runner, engine, gateway)
        handler = _Errors(made.errors)
        logging.getLogger().addHandler(handler)
        try:
            yield made
        finally:
            logging.getLogger().removeHandler(handler)
            runner.run(stack.aclose())


async def _enter(stack: contextlib.AsyncExitStack, parts: Any) -> Any:
    return await stack.enter_async_context(parts)


def wanted(request: strict_http.Request) -> tuple[str, bytes] | None:
    """Path and body with which an engine should be asked; None where the gateway is to answer itself."""
    if request.method != b"POST" or len(request.body) > MAX_BODY_BYTES:
        return None
    rest = request.target
    if absolute := _ABSOLUTE.match(rest):
        rest = rest[absolute.end() :]
    path = urllib.parse.unquote_to_bytes(re.split(rb"[?#]", rest)[0])
    route = ROUTES.get(path)
    if route is None:
        return None
    admission = admit(route, request.body, ("tiny",), Aliases.parse(""), lambda _: None)
    return (route.path, admission.body) if isinstance(admission, Admission) else None


def judge(data: bytes, outcome: Outcome) -> strict_http.Reading:
    """The property of every example. Returns what the strict parser reads in `data`."""
    reading = strict_http.read_requests(data)
    answers, requests = outcome.answers, reading.requests
    asked = [found for found in map(wanted, requests) if found is not None]

    forwarded = [(r.path.partition("?")[0], r.body) for r in outcome.forwarded]
    assert forwarded == asked[: len(forwarded)]  # what the strict parser accepts, in its order, and nothing more
    for r in outcome.forwarded:
        (alone,) = strict_http.read_requests(r.head + r.raw_body).requests  # and one request to an engine, too
        assert alone.body == r.body

    assert all(answer.complete for answer in answers)
    assert all(answer.status < 500 for answer in answers)
    assert len(answers) <= len(requests) + 1
    assert all(answer.header(b"connection") != b"close" for answer in answers[:-1])
    echoes = [json.loads(a.body)["echo"] for a in answers if a.status == 200 and a.body.startswith(b'{"echo"')]
    assert echoes == [body.hex() for _, body in forwarded]  # each is answered, to whom asked, in turn
    for request, answer in zip(requests, answers, strict=False):
        if answer.body.startswith(b'{"echo"'):
            found = wanted(request)
            assert found is not None
            assert json.loads(answer.body)["echo"] == found[1].hex()
    if len(answers) < len(requests):  # it refused what the strict parser takes, or was asked to close
        assert outcome.closed
        assert answers
        assert answers[-1].header(b"connection") == b"close"
    if len(answers) > len(requests):  # to what is no whole request; the gateway's own routes do not wait for the body
        assert reading.end in ("malformed", "incomplete")
        if b'"invalid_http"' in answers[-1].body:
            assert outcome.closed
            assert answers[-1].header(b"connection") == b"close"
    if reading.end == "malformed":
        assert outcome.closed
        assert answers
    return reading
