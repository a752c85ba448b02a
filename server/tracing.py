"""Tracing of requests, optional: the extra `otel` and a setting turn it on. Off, it costs a request a call that returns None.

When it is off, the client's own traceparent goes to the engine as it came; when it is on, the engine's spans become children of
the gateway's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol

from kvgate.errors import UsageError
from server.record import RequestRecord

OFF, OTLP = "off", "otlp"
CLOSE_SECONDS = 5.0


class Trace(Protocol):
    """One request's part in a trace."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits, for the access log."""

    @property
    def header(self) -> bytes:
        """Whole header lines for the engine, in place of the client's traceparent and tracestate."""

    def finish(self, record: RequestRecord) -> None:
        """Hands over the finished span. Never waits and never raises."""


class Tracer(Protocol):
    """Begins traces. `headers`: the request's, names in lower case."""

    def begin(self, headers: list[tuple[bytes, bytes]]) -> Trace | None:
        """None where nothing is traced: leave the client's headers as they are."""

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Sends what is left; blocks for at most about `seconds`, so call it in a thread or after the loop."""


class NoTracer:
    """Tracing that is off."""

    def begin(self, headers: list[tuple[bytes, bytes]]) -> None:
        return None

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        pass


def open_tracer(mode: str, scheme: str = "http", environ: Mapping[str, str] | None = None) -> Tracer:
    """`mode` is "off" or "otlp"; the rest comes from OpenTelemetry's own OTEL_* variables. Raises UsageError.

    scheme: that of the URLs that clients use, for the spans.
    """
    environ = os.environ if environ is None else environ
    if mode not in (OFF, OTLP):
        raise UsageError(f"--tracing {mode!r} is not one of {OFF}, {OTLP}")
    if mode == OFF or environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return NoTracer()
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip() or OTLP
    if exporter == "none":
        return NoTracer()
    if exporter != OTLP:
        raise UsageError(f"OTEL_TRACES_EXPORTER={exporter}: --tracing {OTLP} knows otlp and none")
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = environ.get(name, "").strip()
        if protocol not in ("", "http/protobuf"):
            raise UsageError(f"{name}={protocol}: only http/protobuf is supported (port 4318 of most collectors)")
    try:
        from server.otel import OtelTracer
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise UsageError(f"--tracing {OTLP} needs the extra: pip install '.[otel]'") from error
    return OtelTracer.otlp(scheme)
