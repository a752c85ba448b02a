"""Spans of finished requests for OpenTelemetry. Imported only when tracing is on: the SDK is the extra `otel`.

A span is made when its request is finished, from the record that the access log gets, with the times that lie in it; what is
needed before that is its id. It is handed to a batch processor, whose thread sends it.

Names are those of the GenAI conventions. They have left the main conventions' package, which marks its constants deprecated
and keeps the same names, so they are written out here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from threading import Thread
from time import monotonic

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from kvgate import __version__
from kvgate.errors import UsageError
from server.metrics import OTHER
from server.record import RequestRecord
from server.traceparent import RANDOM, SAMPLED, Parent, header_lines, read_parent
from server.tracing import CLOSE_SECONDS

logger = logging.getLogger("kvgate")

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
CLIENT_GONE = 499
_SCOPE = InstrumentationScope("kvgate", __version__)
_UNSET, _ERROR = Status(StatusCode.UNSET), Status(StatusCode.ERROR)
_NOBODY = Context()  # not the one of the task that happens to run


class OtelTrace:
    """See server.tracing.Trace."""

    __slots__ = ("_flags", "_id", "_parent", "_trace_id", "_tracer")

    def __init__(self, tracer: OtelTracer, trace_id: int, span_id: int, flags: int, parent: Parent | None) -> None:
        self._tracer = tracer
        self._trace_id = trace_id
        self._id = span_id
        self._flags = flags
        self._parent = parent

    @property
    def trace_id(self) -> str:
        return f"{self._trace_id:032x}"

    @property
    def header(self) -> bytes:
        state = self._parent.state if self._parent is not None else b""
        return header_lines(self._trace_id, self._id, self._flags, state)

    def finish(self, record: RequestRecord) -> None:
        if self._flags & SAMPLED:
            context = SpanContext(self._trace_id, self._id, False, TraceFlags(self._flags), _state(self._parent))
            parent = None if self._parent is None else _context(self._parent)
            self._tracer.emit(record, context, parent)


class OtelTracer:
    """See server.tracing.Tracer. The sampler decides when the request begins; by default as the client's flag says, else yes."""

    def __init__(
        self,
        processor: SpanProcessor,
        sampler: Sampler,
        resource: Resource,
        scheme: str = "http",
        ids: IdGenerator | None = None,
    ) -> None:
        self._processor = processor
        self._sampler = sampler
        self._resource = resource
        self._scheme = scheme
        self._ids = ids or RandomIdGenerator()

    @classmethod
    def otlp(cls, scheme: str = "http") -> OtelTracer:
        """As the OTEL_* variables say: resource, sampler, exporter, batches. Raises UsageError for a value that cannot be."""
        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "kvgate"}))
        resource = Resource({SERVICE_VERSION: __version__}).merge(resource)
        try:
            sampler = TracerProvider(resource=resource, shutdown_on_exit=False).sampler
            processor = BatchSpanProcessor(OTLPSpanExporter())
        except (ValueError, OSError) as error:
            raise UsageError(f"--tracing otlp: an OTEL_ variable is wrong: {error}") from error
        return cls(processor, sampler, resource, scheme)

    def begin(self, headers: list[tuple[bytes, bytes]]) -> OtelTrace:
        parent = read_parent(headers)
        if parent is None:
            trace_id, random = self._ids.generate_trace_id(), RANDOM if self._ids.is_trace_id_random() else 0
            around = _NOBODY
        else:
            trace_id, random = parent.trace_id, parent.flags & RANDOM
            around = set_span_in_context(NonRecordingSpan(_context(parent)), _NOBODY)
        decision = self._sampler.should_sample(around, trace_id, "request", SpanKind.SERVER).decision
        flags = random | (SAMPLED if decision is Decision.RECORD_AND_SAMPLE else 0)
        return OtelTrace(self, trace_id, self._ids.generate_span_id(), flags, parent)

    def emit(self, record: RequestRecord, context: SpanContext, parent: SpanContext | None) -> None:
        """The finished span of a request, to the processor."""
        operation = OPERATIONS.get(record.route)
        end = int(record.ended * 1e9)
        start = end - int((record.duration or 0.0) * 1e9)
        events = () if record.ttft is None else (Event("first_token", timestamp=start + int(record.ttft * 1e9)),)
        span = ReadableSpan(
            name=f"{operation} {record.model}" if operation else f"POST {record.route}",
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=self._attributes(record, operation),
            events=events,
            kind=SpanKind.SERVER,
            status=_ERROR if record.status >= 500 else _UNSET,
            start_time=start,
            end_time=end,
            instrumentation_scope=_SCOPE,
        )
        self._processor.on_end(span)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """The processor's own end may take half a minute where no collector answers; this one may not."""
        begun = monotonic()
        thread = Thread(target=self._processor.shutdown, name="tracing-end", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            logger.warning("the last spans could not be sent within %.1f s", monotonic() - begun)

    def _attributes(self, record: RequestRecord, operation: str | None) -> Mapping[str, str | int | float | bool]:
        host, _, port = (record.replica or "").rpartition(":")
        failed = record.status >= 500 or record.status == CLIENT_GONE
        given: dict[str, str | int | float | bool | None] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "vllm" if operation else None,
            "gen_ai.request.model": record.model if record.model != OTHER else None,
            "gen_ai.request.stream": record.stream if operation else None,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            "gen_ai.response.time_to_first_chunk": record.ttft,
            "http.request.method": "POST",
            "http.response.status_code": record.status,
            "http.route": record.route,
            "url.path": record.route,
            "url.scheme": self._scheme,
            "error.type": (record.reason or str(record.status)) if failed else None,
            "server.address": host.strip("[]") or None,
            "server.port": int(port) if port.isdecimal() else None,
            "kvgate.request_id": record.request_id.decode("latin-1"),
            "kvgate.tenant": record.tenant,
            "kvgate.queue_seconds": record.queue,
            "kvgate.overhead_seconds": record.overhead,
            "kvgate.retries": record.retries,
        }
        return {name: value for name, value in given.items() if value is not None}


def _context(parent: Parent) -> SpanContext:
    return SpanContext(parent.trace_id, parent.span_id, True, TraceFlags(parent.flags), _state(parent))


def _state(parent: Parent | None) -> TraceState:
    """Of a caller's tracestate, which was checked when it was read."""
    if parent is None or not parent.state:
        return TraceState()
    members = (member.strip().partition("=") for member in parent.state.decode("ascii").split(","))
    return TraceState([(key, value) for key, _, value in members if key])
