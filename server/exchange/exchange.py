"""One proxied request and its one owner.

The Exchange holds the request's body, its place at a replica, its engine connection and its metrics, and gives each up
exactly once, in `_finish`, on every way out: answered, failed, timed out, or the client gone at any moment.
"""

from __future__ import annotations

import asyncio
import re
from time import monotonic
from typing import TYPE_CHECKING

from kvgate.errors import Problem
from server.admission import Admission
from server.exchange.answer import AnswerWriter
from server.exchange.http1 import CONTINUE, Header, request_head
from server.exchange.sse import EventBuffer, events
from server.exchange.upstream import EngineConnection
from server.metrics import OTHER, Series
from server.routes import Route
from server.usage import USAGE, has_content, read_usage, without_usage

if TYPE_CHECKING:
    from server.exchange.protocol import ClientConnection
    from server.replicas import Replica

CLIENT_GONE = 499
NEVER = float("inf")
_SAFE_ID = re.compile(rb"[!-~]{1,128}\Z")


class _NobodyWaits:
    """Stands where uvicorn wakes an ASGI application; an exchange has none."""

    def set(self) -> None:
        pass


class Exchange:
    """See the module. It stands in uvicorn's place for a request cycle, hence the public names in the first group."""

    __slots__ = (
        "_admission",
        "_answer",
        "_answer_headers",
        "_answer_lines",
        "_body",
        "_client",
        "_connection",
        "_contents",
        "_dialing",
        "_events",
        "_gateway",
        "_headers",
        "_held",
        "_holding",
        "_loop",
        "_parts",
        "_problem",
        "_ready_at",
        "_replica",
        "_reused",
        "_route",
        "_series",
        "_size",
        "_stalled",
        "_status",
        "_target",
        "_tried",
        "_usage_bytes",
        "deadline",
        "disconnected",
        "queued",
        "request_id",
        "response_complete",
        "wants_continue",
    )
    message_event = _NobodyWaits()

    def __init__(self, client: ClientConnection, route: Route, target: bytes, http10: bool, keep_alive: bool) -> None:
        self.response_complete = False
        self.disconnected = False
        self.queued = False  # behind an earlier request of the same connection

        self._client = client
        self._gateway = client.gateway
        self._loop = client.loop
        self._route = route
        self._target = target
        self._headers: list[Header] = client.headers
        self._answer = AnswerWriter(client.transport, http10, keep_alive)
        self.wants_continue = client.expect_100_continue
        self.request_id = b""
        self.deadline = NEVER

        self._parts: list[bytes] = []
        self._size = 0
        self._body: bytes | None = None  # once it is complete
        self._problem: Problem | None = None  # to be answered when the turn comes
        self._ready_at = 0.0
        self._admission: Admission | None = None
        self._series: Series = client.gateway.metrics.series(route.label, OTHER, "default")  # until it is admitted

        self._tried: list[Replica] = []
        self._replica: Replica | None = None
        self._connection: EngineConnection | None = None
        self._dialing: asyncio.Task[None] | None = None
        self._reused = False

        self._status = 0
        self._answer_headers: list[Header] = []
        self._answer_lines: list[bytes] = []
        self._holding = False
        self._held = bytearray()
        self._events: EventBuffer | None = None
        self._contents = 0  # events of a stream from its first content on
        self._stalled = False  # by a client that does not read
        self._usage_bytes = b""

    # -- what uvicorn's protocol asks of a request cycle

    @property
    def keep_alive(self) -> bool:
        return self._answer.keep_alive

    @keep_alive.setter
    def keep_alive(self, value: bool) -> None:
        self._answer.keep_alive = value

    # -- the request

    def begin(self) -> None:
        """Its turn: all earlier answers of the connection are complete."""
        if self.response_complete:
            return
        if self._problem is not None:
            self.refuse(self._problem)
        elif self._body is not None:
            self._dispatch()
        elif self.wants_continue:
            self._client.transport.write(CONTINUE)

    def receive(self, data: bytes) -> None:
        """A piece of the request's body."""
        if self._problem is not None or self.response_complete:
            return
        self._size += len(data)
        if self._size > self._gateway.settings.max_body_bytes:
            self.refuse(self.too_large())
            return
        self._parts.append(data)

    def received(self) -> None:
        """The request's body is complete."""
        if self._problem is not None or self.response_complete:
            return
        parts = self._parts
        self._body = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        if not self.queued:
            self._dispatch()

    def too_large(self) -> Problem:
        limit = self._gateway.settings.max_body_bytes
        return Problem(413, "body_too_large", f"The body exceeds the limit of {limit} bytes (--max-body-bytes).")

    def refuse(self, problem: Problem) -> None:
        """Answers a request whose body is not (wholly) read; the connection ends with the answer."""
        if self.queued:
            self._problem = problem
            self._parts.clear()
            return
        self._answer.keep_alive = False
        self._client.discard_rest()
        self._fail(problem)

    # -- to the engine

    def _dispatch(self) -> None:
        self._ready_at = monotonic()
        self._choose_id()
        body = self._body
        assert body is not None
        admission = self._gateway.admit(self._route, self._headers, body)
        if isinstance(admission, Problem):
            self._fail(admission)
            return
        self._admission = admission
        self._body = admission.body
        self._series = self._gateway.metrics.series(self._route.label, admission.model, admission.tenant)
        self._try_next()

    def _choose_id(self) -> None:
        for name, value in self._headers:
            if name == b"x-request-id" and _SAFE_ID.match(value):
                self.request_id = value
                return
        self.request_id = self._gateway.new_id()

    def _try_next(self, failed: Replica | None = None) -> None:
        """Takes the next replica, after `failed` if one did; answers 503 where none is left."""
        admission = self._admission
        assert admission is not None
        replica = self._gateway.replicas.pick(admission.model, self._tried)
        if replica is None:
            self._fail(self._gateway.unavailable())
            return
        if failed is not None:
            self._gateway.metrics.retries.labels(failed.name).inc()
        self._tried.append(replica)
        self._replica = replica
        replica.inflight += 1
        connection = replica.pool.take()
        if connection is not None:
            self._reused = True
            self._send(connection)
        else:
            self._dial(replica)

    def _dial(self, replica: Replica) -> None:
        self._reused = False
        self._dialing = self._loop.create_task(self._connect(replica))

    async def _connect(self, replica: Replica) -> None:
        try:
            connection = await replica.pool.dial(self._gateway.settings.connect_timeout)
        except OSError:
            self._dialing = None
            self._leave_replica()
            self._gateway.replicas.mark(replica, up=False)
            self._try_next(failed=replica)
            return
        self._dialing = None
        self._send(connection)

    def _send(self, connection: EngineConnection) -> None:
        replica, body = self._replica, self._body
        assert replica is not None
        assert body is not None
        self._connection = connection
        now = monotonic()
        self.deadline = now + self._gateway.settings.first_byte_timeout
        self._series.overhead.observe(now - self._ready_at)
        headers, extra = self._gateway.credentials.for_engine(self._headers)
        head = request_head(self._target, replica.pool.host_header, len(body), self.request_id, headers, extra)
        connection.send(self, head, body)

    # -- from the engine (AnswerReader)

    def engine_head(self, status: int, headers: list[Header], length: int | None) -> None:
        replica = self._replica
        assert replica is not None
        settings = self._gateway.settings
        self.deadline = monotonic() + settings.idle_timeout
        self._status = status
        extra = [b"x-request-id: ", self.request_id, b"\r\n", replica.header]
        for name, value in headers:
            if name == b"content-type" and value.startswith(b"text/event-stream"):
                self._events = EventBuffer()
                length = None  # an error event may have to be appended
        if self._events is None and (length is None or length <= settings.max_held_bytes):
            self._holding = True
            self._answer_headers, self._answer_lines = headers, extra  # for the head, which follows the body
        else:
            self._answer.head(status, headers, extra, length)

    def engine_body(self, data: bytes, last: bool) -> None:
        if last:
            self._connection = None  # back in its pool
        if self._events is not None:
            self._relay_events(self._events, data, last)
        elif self._holding:
            self._hold(data, last)
        else:
            self._relay(data, last)

    def engine_lost(self, why: str, began: bool) -> None:
        self._connection = None
        replica = self._replica
        assert replica is not None
        if not began and self._reused:
            # A kept connection that the engine closed just as it was used: the request was not read. Once, and anew.
            self._gateway.metrics.retries.labels(replica.name).inc()
            self._dial(replica)
            return
        self._fail(Problem(502, "engine_failed", f"The engine {why} before its answer was complete."))

    # -- to the client

    def _relay_events(self, buffer: EventBuffer, data: bytes, last: bool) -> None:
        self.deadline = monotonic() + self._gateway.settings.idle_timeout
        try:
            whole = buffer.take(data)
        except OverflowError:
            self._fail(Problem(502, "engine_failed", "The engine sent an event that is too large."))
            return
        admission = self._admission
        assert admission is not None
        if whole:
            if USAGE.search(whole):
                self._usage_bytes = whole
                if admission.hides_usage:
                    whole = without_usage(whole)
            if self._contents:
                self._contents += 1 + whole.count(b"\ndata:", 1)
            elif contents := sum(map(has_content, events(whole))):
                self._contents = contents
                self._series.ttft.observe(monotonic() - self._ready_at)
        if last:
            whole += buffer.rest  # an end without its empty line; the bytes are the engine's
        if whole or last:
            self._answer.write(whole, last)
        if last:
            self._finish(self._status)

    def _hold(self, data: bytes, last: bool) -> None:
        held = self._held
        held += data
        if not last:
            self.deadline = monotonic() + self._gateway.settings.idle_timeout
            if len(held) > self._gateway.settings.max_held_bytes:  # too large to wait for: from here on as it comes
                self._holding = False
                self._answer.head(self._status, self._answer_headers, self._answer_lines, None)
                self._relay(bytes(held), False)
                held.clear()
            return
        body = data if len(held) == len(data) else bytes(held)
        usage = read_usage(body)
        extra = self._answer_lines
        if usage is not None:
            self._series.used(usage)
            if usage.cached is not None:
                extra.append(b"x-kvgate-delivered-tokens: %d\r\n" % usage.cached)
        self._answer.head(self._status, self._answer_headers, extra, len(body))
        self._answer.write(body, True)
        self._finish(self._status)

    def _relay(self, data: bytes, last: bool) -> None:
        self.deadline = monotonic() + self._gateway.settings.idle_timeout
        self._answer.write(data, last)
        if USAGE.search(data):
            self._usage_bytes = data
        if last:
            self._finish(self._status)

    # -- the ways out

    def client_gone(self) -> None:
        """The client left: the engine's work is aborted."""
        if not self.response_complete:
            self.disconnected = True
            self._finish(CLIENT_GONE)

    def timed_out(self) -> None:
        """The engine let its deadline pass, or the client did, by not reading."""
        if self._stalled:
            self._client.transport.abort()
            self.client_gone()
            return
        what = (
            "sent nothing for too long" if self._answer.started or self._status else "did not begin to answer in time"
        )
        self._fail(Problem(504, "engine_timeout", f"The engine {what}."))

    def _fail(self, problem: Problem) -> None:
        if not self.request_id:
            self._choose_id()
        answer, dialect = self._answer, self._route.dialect
        if not answer.started:
            answer.problem(problem, dialect, self.request_id)
        elif self._events is not None:
            answer.cut(problem.event(dialect, self.request_id.decode("ascii")))
        else:
            answer.keep_alive = False  # the body stays short of its length: the client can tell
        self._finish(problem.status)

    def _finish(self, code: int) -> None:
        """Gives up everything, once."""
        self.response_complete = True
        self.deadline = NEVER
        if self._dialing is not None:
            self._dialing.cancel()
            self._dialing = None
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
        self._leave_replica()
        if self._usage_bytes and (usage := read_usage(self._usage_bytes)):
            self._series.used(usage)
        elif self._contents:  # a stream that broke off: a token for each event is the least that it was
            self._series.output += self._contents
        self._series.finished(code, monotonic() - self._ready_at if self._ready_at else None)
        self._body = None
        self._held.clear()
        if not self.disconnected:
            self._client.answered(self)

    def _leave_replica(self) -> None:
        if self._replica is not None:
            self._replica.inflight -= 1
            self._replica = None

    # -- backpressure: a client that reads slowly slows its engine connection, never the gateway's memory

    def pause(self) -> None:
        """The client does not keep up."""
        if self._connection is not None:
            self._stalled = True
            self._connection.pause()

    def resume(self) -> None:
        """The client reads again."""
        if self._connection is not None:
            self._stalled = False
            self.deadline = monotonic() + self._gateway.settings.idle_timeout
            self._connection.resume()
