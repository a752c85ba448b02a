"""The gateway's metrics. Names and labels are contracts; every label is bounded by configuration."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from server.usage import Usage

OTHER = "other"  # the model label of a request that named none that is served

_TTFT_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 30, 60, 120, 300)
_DURATION_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_OVERHEAD_SECONDS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2)


class Series:
    """The bound series of one (route, model, tenant): looked up once, since label look-ups cost more than counting."""

    __slots__ = (
        "_codes",
        "_families",
        "_labels",
        "cached",
        "duration",
        "known",
        "output",
        "overhead",
        "ttft",
        "unknown",
    )

    def __init__(self, families: GatewayMetrics, route: str, model: str, tenant: str) -> None:
        self._families = families
        self._labels = (route, model, tenant)
        self._codes: dict[int, Counter] = {}
        self.ttft = families.ttft.labels(route, model)
        self.duration = families.duration.labels(route, model)
        self.overhead = families.overhead.labels(route)
        self.known = families.prompt_tokens.labels(model, tenant, "known")
        self.unknown = families.prompt_tokens.labels(model, tenant, "unknown")
        self.output = families.output_tokens.labels(model, tenant)
        self.cached = families.prefix_tokens.labels(model, tenant, "delivered")

    def finished(self, code: int, seconds: float | None) -> None:
        """Counts the request; `seconds` is None where it never arrived whole."""
        counter = self._codes.get(code)
        if counter is None:
            counter = self._codes[code] = self._families.requests.labels(*self._labels, str(code))
        counter.inc()
        if seconds is not None:
            self.duration.observe(seconds)

    def used(self, usage: Usage) -> None:
        if usage.prompt is not None:
            (self.unknown if usage.cached is None else self.known).inc(usage.prompt)
        if usage.cached is not None:
            self.cached.inc(usage.cached)
        if usage.output is not None:
            self.output.inc(usage.output)


class GatewayMetrics:
    """All families, on a registry that the caller gives, so that each test and each gateway has its own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._series: dict[tuple[str, str, str], Series] = {}
        self.requests = Counter(
            "kvgate_requests",
            "Finished requests by HTTP status; 499 is a client that left before its answer was complete.",
            ("route", "model", "tenant", "code"),
            registry=registry,
        )
        self.ttft = Histogram(
            "kvgate_ttft_seconds",
            "From the last byte of a streamed request to its first generated content (a role alone is none).",
            ("route", "model"),
            buckets=_TTFT_SECONDS,
            registry=registry,
        )
        self.duration = Histogram(
            "kvgate_request_duration_seconds",
            "From the last byte of a request to the last byte of its answer.",
            ("route", "model"),
            buckets=_DURATION_SECONDS,
            registry=registry,
        )
        self.overhead = Histogram(
            "kvgate_gateway_overhead_seconds",
            "From the last byte of a request until it was written to an engine: admission, choice, connecting, retries.",
            ("route",),
            buckets=_OVERHEAD_SECONDS,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "kvgate_prompt_tokens",
            "Prompt tokens as the engine reports them; usage=unknown where it did not say how many came from its cache.",
            ("model", "tenant", "usage"),
            registry=registry,
        )
        self.output_tokens = Counter(
            "kvgate_output_tokens",
            "Generated tokens as the engine reports them.",
            ("model", "tenant"),
            registry=registry,
        )
        self.prefix_tokens = Counter(
            "kvgate_prefix_tokens",
            "Prompt tokens by stage; delivered is what the engine reports as served from its prefix cache.",
            ("model", "tenant", "stage"),
            registry=registry,
        )
        self.inflight = Gauge(
            "kvgate_inflight_requests", "Requests that a replica is answering.", ("replica",), registry=registry
        )
        self.retries = Counter(
            "kvgate_retries",
            "Requests sent again, before their first byte, after this replica failed.",
            ("replica",),
            registry=registry,
        )
        self.replica_up = Gauge(
            "kvgate_replica_up", "1 while the replica answers its health check.", ("replica",), registry=registry
        )
        self.kv_utilization = Gauge(
            "kvgate_kv_utilization_ratio",
            "KV blocks in use by running requests / all blocks, as the engine reports. Cached, unused blocks count as free.",
            ("replica",),
            registry=registry,
        )

    def series(self, route: str, model: str, tenant: str) -> Series:
        """The bound series of these labels. `model` is a served name or OTHER: nothing that a client invents."""
        key = (route, model, tenant)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = Series(self, route, model, tenant)
        return series

    def drop_replica(self, replica: str) -> None:
        """Ends the gauges of a replica that is gone. Its counters stay until the next start: they are history."""
        for gauge in (self.inflight, self.replica_up, self.kv_utilization):
            gauge.remove(replica)
