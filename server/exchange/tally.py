"""What is counted of one request: its moments, its retries, its tokens; told once, when it ends."""

from __future__ import annotations

from time import monotonic, time
from typing import TYPE_CHECKING

from server.metrics import OTHER, Series
from server.record import RequestRecord
from server.usage import Usage

if TYPE_CHECKING:
    from server.access_log import AccessLog
    from server.admission import Admission
    from server.exchange.placement import Placement
    from server.exchange.relay import Relay
    from server.replica import Replica
    from server.tenants.budget import Lease
    from server.tenants.keys import Identity
    from server.tracing import Trace

UNKNOWN = Usage(None, None, None)
CLIENT_GONE = 499  # the status of a request whose client left


class Tally:
    """Moments are monotonic seconds, 0 where they have not come. `reason` is the machine word of a refusal.

    `series` is set once it is known whose request for what model this is, or that it will not be known.
    """

    __slots__ = ("ready_at", "reason", "request_bytes", "retries", "sent_at", "series", "slot_at")

    series: Series

    def __init__(self) -> None:
        self.ready_at = 0.0  # the request's last byte came
        self.slot_at = 0.0  # it had its place at the engines
        self.sent_at = 0.0  # it was written to one
        self.retries = 0
        self.request_bytes = 0
        self.reason: str | None = None

    def sent(self, now: float) -> None:
        """It is written to an engine; only the first time counts."""
        if not self.sent_at:
            self.sent_at = now
            self.series.overhead.observe(now - self.ready_at)

    def close(
        self,
        code: int,
        relay: Relay | None,
        placement: Placement | None,
        lease: Lease | None,
        *,
        request_id: bytes,
        identity: Identity | None,
        admission: Admission | None,
        answer_bytes: int,
        log: AccessLog,
        trace: Trace | None,
    ) -> None:
        """The request is over: counts it for metrics, limits and predictions, logs it, and ends its trace."""
        tried = [] if placement is None else placement.tried
        usage = self._count(code, relay, tried[-1] if tried else None, lease)
        if placement is not None and 400 <= code < CLIENT_GONE:  # refused: the engine has computed nothing of it
            placement.failed()
        elif placement is not None:
            placement.end(usage, self.series)
        if log.enabled or trace is not None:
            self._record(code, usage, relay, request_id, identity, admission, tried, answer_bytes, log, trace)

    def _count(self, code: int, relay: Relay | None, replica: Replica | None, lease: Lease | None) -> Usage:
        """What the engine said of tokens, or all unknown."""
        usage = None if relay is None else relay.usage()
        if relay is not None:
            if usage is None and relay.output_at_least:  # a stream that broke off is not free
                usage = Usage(None, relay.output_at_least, None)
            if relay.first_content_at:
                self.series.ttft.observe(relay.first_content_at - self.ready_at)
        if usage is not None:
            self.series.used(usage, None if replica is None else replica.prefill.tokens_per_second)
        if lease is not None:
            if not self.sent_at:
                lease.settle(0, 0, 0)  # no engine has seen it
            elif usage is not None:
                lease.settle(usage.prompt, usage.cached, usage.output)
            lease.release()
        self.series.finished(code, monotonic() - self.ready_at if self.ready_at else None)
        return usage or UNKNOWN

    def _record(
        self,
        code: int,
        usage: Usage,
        relay: Relay | None,
        request_id: bytes,
        identity: Identity | None,
        admission: Admission | None,
        tried: list[Replica],
        answer_bytes: int,
        log: AccessLog,
        trace: Trace | None,
    ) -> None:
        ready = self.ready_at
        record = RequestRecord(
            ended=time(),
            request_id=request_id,
            route=self.series.labels[0],
            model=OTHER if admission is None else admission.model,
            tenant="" if identity is None else identity.tenant,
            status=code,
            stream=admission is not None and admission.stream,
            key_id=None if identity is None else identity.key_id or None,
            replica=tried[-1].name if tried else None,
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            output_tokens=usage.output,
            ttft=relay.first_content_at - ready if relay is not None and relay.first_content_at else None,
            duration=monotonic() - ready if ready else None,
            queue=self.slot_at - ready if self.slot_at else None,
            overhead=self.sent_at - ready if self.sent_at else None,
            retries=self.retries,
            request_bytes=self.request_bytes,
            answer_bytes=answer_bytes,
            reason=self.reason,
            trace_id=None if trace is None else trace.trace_id,
        )
        log.write(record)
        if trace is not None:
            trace.finish(record)
