"""One proxied request and its one owner.

The Exchange holds the request's body, its place in the queue and at a replica, its engine connection, its lease and its
counts, and gives each up exactly once, in `_finish`, on every way out: answered, failed, timed out, or the client gone at
any moment.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

from kvgate.errors import Problem
from server.admission import Admission
from server.breaker import Failure
from server.exchange.answer import AnswerWriter
from server.exchange.attempt import Attempt
from server.exchange.http1 import CONTINUE, AnswerHead, Header, RequestHead, request_head, without
from server.exchange.placement import Placement
from server.exchange.relay import Relay, relay_for
from server.exchange.tally import CLIENT_GONE, Tally
from server.ledger.debug import wants_decision
from server.metrics import OTHER
from server.routes import Route
from server.tenants.budget import Lease
from server.tenants.entries import Tenant
from server.tenants.keys import Identity
from server.tenants.limits import MemoryLimits

if TYPE_CHECKING:
    from server.exchange.protocol import ClientConnection
    from server.ledger.ledger import Ledger
    from server.replicas import Replica
    from server.routing.asked import Asked
    from server.tenants.redis_limits import RedisLimits
    from server.tracing import Trace
    from server.waiting import AdmissionQueue

ELSEWHERE = frozenset((429, 502, 503, 504))  # statuses of an engine after which another one is asked
NEVER = float("inf")
TRACE_HEADERS = (b"traceparent", b"tracestate")


class _NobodyWaits:
    """Stands where uvicorn wakes an ASGI application; an exchange has none."""

    def set(self) -> None:
        pass


class Exchange:
    """See the module. It stands in uvicorn's place for a request cycle, hence the public names in the first group.

    It is a Waiter of the admission queue, and an AttemptOwner.
    """

    __slots__ = (
        "_admission",
        "_answer",
        "_attempt",
        "_body",
        "_client",
        "_gateway",
        "_head",
        "_headers",
        "_identity",
        "_lease",
        "_parts",
        "_placement",
        "_preparing",
        "_problem",
        "_queue",
        "_relay",
        "_route",
        "_slot",
        "_stalled",
        "_status",
        "_tally",
        "_target",
        "_trace",
        "_waiting",
        "deadline",
        "disconnected",
        "pipelined",
        "request_id",
        "response_complete",
        "wants_continue",
    )
    message_event = _NobodyWaits()

    def __init__(
        self,
        client: ClientConnection,
        route: Route,
        target: bytes,
        head: RequestHead,
        http10: bool,
        keep_alive: bool,
    ) -> None:
        self.response_complete = False
        self.disconnected = False
        self.pipelined = False  # behind an earlier request of the same connection
        self.wants_continue = head.expects
        self.deadline = NEVER  # monotonic seconds: when patience with the engine ends
        self.request_id = b""

        self._client = client
        self._gateway = client.gateway
        self._route = route
        self._target = target
        self._head = head
        self._headers: list[Header] = client.headers
        self._answer = AnswerWriter(client.transport, http10, keep_alive)
        self._tally = Tally()

        self._parts: list[bytes] = []
        self._body: bytes | None = None  # once it is complete
        self._problem: Problem | None = None  # to be answered when the turn comes
        self._identity: Identity | None = None
        self._admission: Admission | None = None

        self._lease: Lease | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._queue: AdmissionQueue | None = None
        self._waiting = False  # in the queue
        self._slot = False  # of the queue is taken
        self._placement: Placement | None = None
        self._trace: Trace | None = None
        self._attempt: Attempt | None = None
        self._status = 0  # of the engine's answer
        self._relay: Relay | None = None
        self._stalled = False  # by a client that does not read

    # -- what uvicorn's protocol asks of a request cycle

    @property
    def keep_alive(self) -> bool:
        return self._answer.keep_alive

    @keep_alive.setter
    def keep_alive(self, value: bool) -> None:
        self._answer.keep_alive = value

    @property
    def response_started(self) -> bool:
        return self._answer.decided

    # -- the request

    def authorize(self) -> bool:
        """Whether the headers show a valid key; if not, the request is refused before its body is read."""
        identity = self._gateway.keys.identify(self._head.keys)
        if isinstance(identity, Problem):
            self.refuse(identity)
            return False
        self._identity = identity
        return True

    def begin(self) -> None:
        """Its turn: all earlier answers of the connection are complete."""
        self.pipelined = False
        if self.response_complete:
            return
        if self._problem is not None:
            self.refuse(self._problem)
        elif self._body is not None:
            self._admit()
        elif self.wants_continue:
            self._client.transport.write(CONTINUE)

    def receive(self, data: bytes) -> None:
        """A piece of the request's body."""
        if self._problem is not None or self.response_complete:
            return
        self._tally.request_bytes += len(data)
        if self._tally.request_bytes > self._gateway.settings.max_body_bytes:
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
        if not self.pipelined:
            self._admit()

    def too_large(self) -> Problem:
        limit = self._gateway.settings.max_body_bytes
        return Problem(413, "body_too_large", f"The body exceeds the limit of {limit} bytes (--max-body-bytes).")

    def refuse(self, problem: Problem) -> None:
        """Answers a request whose body is not (wholly) read; the connection ends with the answer."""
        if self.pipelined:
            self._problem = problem
            self._parts.clear()
            return
        self._answer.keep_alive = False
        self._client.discard_rest()
        self._fail(problem)

    # -- its way to an engine: admission, lease, queue, replica

    def _admit(self) -> None:
        self._tally.ready_at = monotonic()
        self._choose_id()
        self._trace = self._gateway.tracer.begin(self._headers)
        body, identity = self._body, self._identity
        assert body is not None
        assert identity is not None
        admission = self._gateway.admit(self._route, identity, body, self._headers)
        if isinstance(admission, Problem):
            self._fail(admission)
            return
        self._admission = admission
        self._body = admission.body
        self._tally.series = self._gateway.metrics.series(self._route.label, admission.model, identity.tenant)
        if not self._gateway.replicas.capacity(admission.model):
            self._fail(self._gateway.unavailable())
            return
        tenant = self._gateway.keys.tenant(identity.tenant)
        if tenant.limits.unlimited:
            self._spell(tenant)
            return
        limits, estimate = self._gateway.limits, self._gateway.estimated_tokens(len(body))
        if isinstance(limits, MemoryLimits):
            self._leased(limits.acquire(identity.tenant, estimate), tenant)
        else:
            self._preparing = asyncio.get_running_loop().create_task(self._wait_for_lease(limits, estimate, tenant))

    async def _wait_for_lease(self, limits: RedisLimits, estimate: int, tenant: Tenant) -> None:
        assert self._identity is not None
        lease = await limits.acquire(self._identity.tenant, estimate)
        self._preparing = None
        self._leased(lease, tenant)

    def _leased(self, lease: Lease | Problem, tenant: Tenant) -> None:
        if isinstance(lease, Problem):
            self._fail(lease)
        else:
            self._lease = lease
            self._spell(tenant)

    def _spell(self, tenant: Tenant) -> None:
        """Its prompt has to be known before a replica is chosen; mostly it is."""
        assert self._admission is not None
        ledger, asked = self._gateway.ledger, self._admission.asked
        if ledger is None or not asked.unspelled:
            self._enter(tenant)
        else:
            self._preparing = asyncio.get_running_loop().create_task(self._wait_for_spelling(ledger, asked, tenant))

    async def _wait_for_spelling(self, ledger: Ledger, asked: Asked, tenant: Tenant) -> None:
        await ledger.spell(asked)
        self._preparing = None
        self._enter(tenant)

    def _choose_id(self) -> None:
        self.request_id = self._head.request_id or self._gateway.new_id()

    def _enter(self, tenant: Tenant) -> None:
        identity, admission, gateway = self._identity, self._admission, self._gateway
        assert identity is not None
        assert admission is not None
        self._queue = gateway.queues.of(gateway.replicas.pool_of(admission.model))
        try:
            runs = self._queue.enter(self, identity.tenant, tenant.weight, tenant.priority)
        except Problem as problem:
            self._fail(problem)
            return
        if runs:
            self.admitted()
        else:
            self._waiting = True

    def admitted(self) -> None:
        """The queue has given a slot."""
        self._waiting = False
        self._slot = True
        self._tally.slot_at = monotonic()
        self._gateway.retry_budget.request()
        gateway, admission, identity = self._gateway, self._admission, self._identity
        assert admission is not None
        assert identity is not None
        explains = gateway.ledger is not None and identity.role == "operator" and wants_decision(self._headers)
        self._placement = Placement(gateway.replicas, gateway.ledger, admission, explains)
        replica = self._placement.pick()
        if replica is None:  # the last one went while this waited
            self._fail(self._gateway.unavailable())
        else:
            self._attempt_at(replica)

    def refused(self, problem: Problem) -> None:
        """The queue has none in time."""
        self._waiting = False
        self._fail(problem)

    def _attempt_at(self, replica: Replica) -> None:
        admission, placement = self._admission, self._placement
        assert admission is not None
        assert placement is not None
        placement.sent(replica)
        lines, extra = self._head.lines, self._gateway.credentials.for_engine(self._head.keys)
        if self._trace is not None:
            lines = without(lines, TRACE_HEADERS)
            extra += self._trace.header
        body = admission.body
        head = request_head(self._target, replica.pool.host_header, len(body), self.request_id, lines, extra)
        self._attempt = Attempt(replica, self, head, body)
        self._attempt.start(self._gateway.settings.connect_timeout)

    def _try_elsewhere(self) -> bool:
        """Gives up the present attempt for one at another replica. False if there is none, or no retry left in the budget."""
        gateway, failed, placement = self._gateway, self._attempt, self._placement
        assert failed is not None
        assert placement is not None
        replica = placement.pick()
        if replica is None:
            return False
        if not gateway.retry_budget.try_retry():
            gateway.replicas.gave_up(replica)
            return False
        failed.end()
        placement.failed()
        self._count_retry(failed.replica)
        self.deadline = NEVER
        self._attempt_at(replica)
        return True

    def _count_retry(self, failed: Replica) -> None:
        self._tally.retries += 1
        self._gateway.metrics.retries.labels(failed.name).inc()

    # -- from the attempt (AttemptOwner)

    def request_sent(self) -> None:
        now = monotonic()
        self.deadline = now + self._gateway.settings.first_byte_timeout
        self._tally.sent(now)

    def engine_unreachable(self) -> None:
        attempt = self._attempt
        assert attempt is not None
        self._judge(Failure.CONNECT)
        if not self._try_elsewhere():
            self._fail(self._gateway.unavailable())

    def engine_head(self, head: AnswerHead) -> None:
        attempt, admission, placement, status = self._attempt, self._admission, self._placement, head.status
        assert attempt is not None
        assert admission is not None
        assert placement is not None
        if status >= 500:
            self._judge(Failure.STATUS)
        else:
            self._gateway.replicas.began(attempt.replica)
        if status in ELSEWHERE and (status != 429 or len(placement.tried) == 1) and self._try_elsewhere():
            return
        settings = self._gateway.settings
        self.deadline = monotonic() + settings.idle_timeout
        self._status = status
        lines = [b"x-request-id: ", self.request_id, b"\r\n", attempt.replica.header]
        lines += placement.lines()
        lines += self._gateway.cors.lines(self._headers)
        self._relay = relay_for(
            self._answer, head, lines, hides_usage=admission.hides_usage, max_held=settings.max_held_bytes
        )

    def engine_body(self, data: bytes, last: bool) -> None:
        attempt, relay, placement = self._attempt, self._relay, self._placement
        assert attempt is not None
        assert relay is not None
        assert placement is not None
        if last:
            attempt.disconnected()
            self._judge(None)
        elif not self._stalled:
            self.deadline = monotonic() + self._gateway.settings.idle_timeout
        try:
            relay.feed(data, last)
        except OverflowError:
            self._fail(Problem(502, "engine_failed", "The engine sent an event that is too large."))
            return
        if relay.first_content_at and placement.unbegun is not None:
            placement.first_token()
        if last:
            self._finish(self._status)

    def engine_lost(self, why: str, began: bool) -> None:
        attempt = self._attempt
        assert attempt is not None
        attempt.disconnected()
        if not began and attempt.reused:
            # A kept connection that the engine closed just as it was used: the request was not read. Once, and anew.
            self._count_retry(attempt.replica)
            attempt.dial(self._gateway.settings.connect_timeout)
            return
        self._judge(Failure.LOST)
        self._fail(Problem(502, "engine_failed", f"The engine {why} before its answer was complete."))

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
        self._judge(Failure.TIMEOUT)
        what = "sent nothing for too long" if self._status else "did not begin to answer in time"
        self._fail(Problem(504, "engine_timeout", f"The engine {what}."))

    def _fail(self, problem: Problem) -> None:
        if not self.request_id:
            self._choose_id()
        self._tally.reason = problem.reason
        if problem.reason is not None:
            self._gateway.metrics.rejected(problem.reason)
        answer, dialect = self._answer, self._route.dialect
        if not answer.started:
            answer.problem(problem, dialect, self.request_id, self._gateway.cors.lines(self._headers))
        elif self._relay is not None:
            self._relay.cut(problem, dialect, self.request_id.decode("ascii"))
        self._finish(problem.status)

    def _finish(self, code: int) -> None:
        """Gives up everything, once."""
        self.response_complete = True
        self.deadline = NEVER
        if self._preparing is not None:
            self._preparing.cancel()
        if self._waiting and self._queue is not None:
            self._queue.leave(self)
        if self._attempt is not None:
            if not self._attempt.judged:
                self._attempt.judged = True
                self._gateway.replicas.gave_up(self._attempt.replica)
            self._attempt.end()
        if self._admission is None:
            tenant = "" if self._identity is None else self._identity.tenant
            self._tally.series = self._gateway.metrics.series(self._route.label, OTHER, tenant)
        self._tally.close(
            code,
            self._relay,
            self._placement,
            self._lease,
            request_id=self.request_id,
            identity=self._identity,
            admission=self._admission,
            answer_bytes=self._answer.written,
            log=self._gateway.access_log,
            trace=self._trace,
        )
        # What is large goes now, though the connection keeps this until its next request; and without cycles, which would
        # leave the freeing to the collector: pauses, and memory by the hundred megabytes
        self._body = self._admission = self._relay = self._attempt = self._placement = None
        if self._slot and self._queue is not None:
            self._slot = False
            self._queue.release()
        if not self.disconnected:
            self._client.answered(self)

    def _judge(self, failure: Failure | None) -> None:
        """The verdict on the present attempt, once; None is a good answer."""
        attempt, placement = self._attempt, self._placement
        assert attempt is not None
        assert placement is not None
        if attempt.judged:
            return
        attempt.judged = True
        if failure is None:
            self._gateway.replicas.succeeded(attempt.replica)
        else:
            self._gateway.replicas.failed(attempt.replica, failure, retry=len(placement.tried) > 1)

    # -- backpressure: a client that reads slowly slows its engine connection, never the gateway's memory

    def pause(self) -> None:
        """The client does not keep up."""
        if self._attempt is not None and self._attempt.pause():
            self._stalled = True

    def resume(self) -> None:
        """The client reads again."""
        if self._stalled and self._attempt is not None:
            self._stalled = False
            self.deadline = monotonic() + self._gateway.settings.idle_timeout
            self._attempt.resume()
