"""Tracing: what is taken from a client, what goes to the engine, and the spans that a real collector's port receives."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, DEFAULT_ON, Sampler
from opentelemetry.semconv import _incubating
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvgate.errors import UsageError
from server.otel import OPERATIONS, OtelTracer
from server.record import RequestRecord
from server.routes import ROUTES
from server.traceparent import Parent, header_lines, read_parent
from server.tracing import NoTracer, open_tracer

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01".encode()
RECORD = RequestRecord(
    ended=1_800_000_003.5,
    request_id=b"req-1",
    route="/v1/chat/completions",
    model="qwen3",
    tenant="acme",
    status=200,
    stream=True,
    replica="10.0.0.7:8001",
    prompt_tokens=1000,
    cached_tokens=960,
    output_tokens=20,
    ttft=0.5,
    duration=3.5,
)


class Kept:
    """A tracer whose spans stay here."""

    def __init__(self, sampler: Sampler = DEFAULT_ON) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer = OtelTracer(SimpleSpanProcessor(self._exporter), sampler, Resource({"service.name": "kvgate"}))

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    def span(self, record: RequestRecord, *headers: tuple[bytes, bytes]) -> ReadableSpan:
        self.tracer.begin(list(headers)).finish(record)
        return self.spans[-1]


# -- the headers


def test_a_traceparent_is_read() -> None:
    headers = [(b"traceparent", VALID), (b"tracestate", b"a=1, b@v=x y"), (b"tracestate", b"c=3")]
    assert read_parent(headers) == Parent(int(TRACE, 16), int(SPAN, 16), 1, b"a=1, b@v=x y,c=3")


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"00",
        VALID.upper(),
        VALID + b"-00",
        VALID + b"0",
        VALID.replace(b"00-", b"ff-", 1),
        VALID.replace(b"00-", b"0-", 1),
        VALID.replace(TRACE.encode(), b"0" * 32),
        VALID.replace(SPAN.encode(), b"0" * 16),
        VALID.replace(b"-01", b"-0g"),
        b"cc-" + VALID[3:] + b"x",
        VALID + b"\n",
        VALID.replace(b"-", b"_"),
    ],
)
def test_a_malformed_traceparent_begins_a_new_trace(value: bytes) -> None:
    headers = [(b"traceparent", value), (b"tracestate", b"a=1")]
    assert read_parent(headers) is None
    trace = Kept().tracer.begin(headers)
    assert trace.trace_id != TRACE
    assert b"tracestate" not in trace.header


def test_two_traceparents_are_none() -> None:
    assert read_parent([(b"traceparent", VALID), (b"traceparent", VALID)]) is None


def test_a_later_version_is_read_by_what_is_known_of_it() -> None:
    later = b"cc-" + VALID[3:-2] + b"ff-what-follows"
    parent = read_parent([(b"traceparent", later)])
    assert parent is not None
    assert parent.flags == 3


@pytest.mark.parametrize(
    "state", [b"a", b"A=1", b"a=", b"a=1,a=2", b"a=1;b=\x80", b",", ",".join(f"k{n}=1" for n in range(33)).encode()]
)
def test_a_malformed_tracestate_is_left_out_alone(state: bytes) -> None:
    parent = read_parent([(b"traceparent", VALID), (b"tracestate", state)])
    assert parent is not None
    assert parent.state == b""


@given(
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.integers(0, 3),
    st.lists(
        st.from_regex(r"[a-z][a-z0-9_*/-]{0,9}=[!-+]{1,9}", fullmatch=True),
        max_size=32,
        unique_by=lambda m: m.split("=")[0],
    ),
)
def test_what_is_written_reads_back_and_opentelemetry_reads_the_same(
    trace: int, span: int, flags: int, members: list[str]
) -> None:
    state = ",".join(members).encode()
    lines = header_lines(trace, span, flags, state)
    headers = [tuple(line.split(b": ", 1)) for line in lines.split(b"\r\n") if line]
    assert read_parent(headers) == Parent(trace, span, flags, state)  # type: ignore[arg-type]
    carrier = {name.decode(): value.decode() for name, value in headers}  # type: ignore[misc]
    (theirs,) = (TraceContextTextMapPropagator().extract(carrier) or {}).values()
    context = theirs.get_span_context()  # type: ignore[attr-defined]
    assert (context.trace_id, context.span_id) == (trace, span)
    assert context.trace_state.to_header() == state.decode()


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_no_header_breaks_it(parent: bytes, state: bytes) -> None:
    headers = [(b"traceparent", parent), (b"tracestate", state)]
    assert read_parent(headers) is None
    Kept().tracer.begin([(b"traceparent", VALID), (b"tracestate", state)]).finish(RECORD)


# -- to the engine


def test_the_engines_span_becomes_a_child_of_the_gateways() -> None:
    kept = Kept()
    trace = kept.tracer.begin([(b"traceparent", VALID), (b"tracestate", b"a=1")])
    trace.finish(RECORD)
    (span,) = kept.spans
    assert trace.trace_id == TRACE
    assert trace.header == f"traceparent: 00-{TRACE}-{span.context.span_id:016x}-01\r\ntracestate: a=1\r\n".encode()
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == SPAN
    assert span.parent.is_remote


def test_a_request_without_a_trace_begins_one() -> None:
    kept = Kept()
    trace = kept.tracer.begin([])
    trace.finish(RECORD)
    (span,) = kept.spans
    assert re.fullmatch(rb"traceparent: 00-[0-9a-f]{32}-[0-9a-f]{16}-03\r\n", trace.header)
    assert f"{span.context.trace_id:032x}" == trace.trace_id
    assert span.parent is None


@pytest.mark.parametrize(("sampler", "flags"), [(DEFAULT_ON, b"00"), (ALWAYS_OFF, b"01")])
def test_what_is_not_sampled_is_passed_on_as_such_and_makes_no_span(sampler: Sampler, flags: bytes) -> None:
    kept = Kept(sampler)
    trace = kept.tracer.begin([(b"traceparent", VALID[:-2] + flags)])
    trace.finish(RECORD)
    assert trace.header.startswith(f"traceparent: 00-{TRACE}-".encode())
    assert trace.header.endswith(b"-00\r\n")
    assert kept.spans == ()


# -- the span


def test_a_span_has_the_times_and_numbers_of_its_record() -> None:
    span = Kept().span(RECORD)
    assert span.name == "chat qwen3"
    assert (span.start_time, span.end_time) == (1_800_000_000_000_000_000, 1_800_000_003_500_000_000)
    (event,) = span.events
    assert (event.name, event.timestamp) == ("first_token", 1_800_000_000_500_000_000)
    assert span.status.is_unset
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "qwen3",
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": 1000,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 960,
        "gen_ai.response.time_to_first_chunk": 0.5,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "server.address": "10.0.0.7",
        "server.port": 8001,
        "kvgate.request_id": "req-1",
        "kvgate.tenant": "acme",
        "kvgate.retries": 0,
    }


def test_names_are_those_of_the_conventions() -> None:
    """Their package keeps the GenAI names, though it marks them as moved: so they are read as text."""
    known = set()
    for part in ("gen_ai", "http", "url", "server", "error"):
        for root in _incubating.__path__:
            with open(f"{root}/attributes/{part}_attributes.py", encoding="utf-8") as file:
                known |= set(re.findall(r'Final = "([a-z_.]+)"', file.read()))
    span = Kept().span(RECORD._replace(status=502))
    assert {name for name in span.attributes or {} if not name.startswith("kvgate.")} - known == set()


def test_what_is_unknown_is_left_out() -> None:
    span = Kept().span(RequestRecord(1.0, b"x", "/v1/completions", "other", "default", 404))
    assert span.name == "text_completion other"
    assert span.start_time == span.end_time
    assert span.events == ()
    assert not {"gen_ai.request.model", "gen_ai.usage.input_tokens", "server.address"} & set(span.attributes or {})


@pytest.mark.parametrize(
    ("status", "reason", "error", "is_error"),
    [(200, None, None, False), (400, None, None, False), (429, "requests", None, False), (499, None, "499", False),
     (502, None, "502", True), (503, "queue_full", "queue_full", True)],
)  # fmt: skip
def test_only_5xx_is_an_error_of_the_server(status: int, reason: str | None, error: str | None, is_error: bool) -> None:
    span = Kept().span(RECORD._replace(status=status, reason=reason))
    assert (span.attributes or {}).get("error.type") == error
    assert span.status.is_unset != is_error


def test_every_operation_is_of_a_route_and_the_rest_are_plain_posts() -> None:
    assert {path.encode() for path in OPERATIONS} <= ROUTES.keys()
    span = Kept().span(RECORD._replace(route="/tokenize"))
    assert span.name == "POST /tokenize"
    assert "gen_ai.operation.name" not in (span.attributes or {})


def test_an_ipv6_replica() -> None:
    attributes = Kept().span(RECORD._replace(replica="[::1]:8001")).attributes or {}
    assert (attributes["server.address"], attributes["server.port"]) == ("::1", 8001)


# -- on and off


def test_off_touches_nothing() -> None:
    for tracer in (
        open_tracer("off"),
        open_tracer("otlp", environ={"OTEL_SDK_DISABLED": "true"}),
        open_tracer("otlp", environ={"OTEL_TRACES_EXPORTER": "none"}),
    ):
        assert isinstance(tracer, NoTracer)
        assert tracer.begin([(b"traceparent", VALID)]) is None
        tracer.close()


@pytest.mark.parametrize(
    ("mode", "environ", "names"),
    [
        ("on", {}, "--tracing"),
        ("otlp", {"OTEL_TRACES_EXPORTER": "console"}, "OTEL_TRACES_EXPORTER"),
        ("otlp", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL"),
    ],
)
def test_what_cannot_be_is_named(mode: str, environ: dict[str, str], names: str) -> None:
    with pytest.raises(UsageError, match=names):
        open_tracer(mode, environ=environ)


def test_without_the_extra_it_is_off_or_a_usage_error() -> None:
    code = """\
import sys
sys.modules["opentelemetry.sdk"] = None
from kvgate.errors import UsageError
from server.tracing import open_tracer
assert open_tracer("off").begin([]) is None
try:
    open_tracer("otlp")
except UsageError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "--tracing otlp needs the extra: pip install '.[otel]'\n"


@contextmanager
def collector(answers: bool = True) -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """The port of a collector, and what it received."""
    received: list[ExportTraceServiceRequest] = []
    released = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if not answers:
                released.wait(10)
            assert self.path == "/v1/traces"
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as (url, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        tracer = open_tracer("otlp", scheme="https")
        trace = tracer.begin([(b"traceparent", VALID)])
        assert trace is not None
        trace.finish(RECORD._replace(status=504))
        tracer.close()
    (resource_spans,) = received[0].resource_spans
    resource = {a.key: a.value.string_value for a in resource_spans.resource.attributes}
    assert resource["service.name"] == "kvgate"
    assert resource["deployment.environment.name"] == "test"
    (span,) = resource_spans.scope_spans[0].spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, SPAN)
    assert span.kind == Span.SPAN_KIND_SERVER
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert span.end_time_unix_nano - span.start_time_unix_nano == 3_500_000_000
    assert [event.name for event in span.events] == ["first_token"]
    assert {a.key: a.value.string_value for a in span.attributes}["url.scheme"] == "https"


def test_the_service_keeps_the_name_that_its_operator_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as (url, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "front-door")
        tracer = OtelTracer.otlp()
        tracer.begin([]).finish(RECORD)
        tracer.close()
    resource = {a.key: a.value.string_value for a in received[0].resource_spans[0].resource.attributes}
    assert resource["service.name"] == "front-door"


def test_a_collector_that_hangs_delays_neither_a_request_nor_the_end_for_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with collector(answers=False) as (url, _):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        tracer = OtelTracer.otlp()
        begun = time.monotonic()
        for _ in range(3000):  # more than the queue holds
            tracer.begin([]).finish(RECORD)
        assert time.monotonic() - begun < 2
        begun = time.monotonic()
        tracer.close(0.2)
        assert time.monotonic() - begun < 1
        assert "could not be sent" in caplog.text
    for thread in threading.enumerate():  # its retries draw random numbers, which tests that come after must not see
        if thread.name == "tracing-end":
            thread.join()
