"""The gateway's metrics. Names and labels are contracts; every label is bounded by configuration.

What a request counts lies in plain numbers, one `Series` for each (route, model, tenant), and becomes metric families when
a scrape asks: prometheus_client's own counters take a lock and a call for each increment, 10 µs a request in all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from server.usage import Usage

OTHER = "other"  # the model label of a request that named none that is served

TTFT_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 30, 60, 120, 300)
DURATION_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
OVERHEAD_SECONDS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2)


class Distribution:
    """Counts by bucket. `edges` are upper bounds in seconds, ascending; the last count is of what exceeds them all."""

    __slots__ = ("_counts", "_edges", "_sum")

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._edges, seconds)] += 1
        self._sum += seconds

    def add(self, other: Distribution) -> None:
        """Takes in what `other`, of the same edges, has counted."""
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        self._sum += other._sum

    def copy(self) -> Distribution:
        """One of the same edges and counts."""
        copy = Distribution(self._edges)
        copy.add(self)
        return copy

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        total, buckets = 0, []
        for edge, count in zip((*map(repr, map(float, self._edges)), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((edge, float(total)))
        family.add_metric(labels, buckets, self._sum)


class Series:
    """What the requests of one (route, model, tenant) have counted. Tokens are as the engine reports them."""

    __slots__ = (
        "available",
        "cached",
        "codes",
        "duration",
        "in_flight",
        "known",
        "labels",
        "matched",
        "matched_delivered",
        "output",
        "overhead",
        "routed",
        "saved_seconds",
        "ttft",
        "unknown",
        "unrated",
    )

    def __init__(self, route: str, model: str, tenant: str) -> None:
        self.labels = (route, model, tenant)
        self.codes: dict[int, int] = {}
        self.ttft = Distribution(TTFT_SECONDS)
        self.duration = Distribution(DURATION_SECONDS)
        self.overhead = Distribution(OVERHEAD_SECONDS)
        self.known = self.unknown = self.output = self.cached = 0
        self.unrated = 0  # cached tokens for which no prefill rate was known
        self.saved_seconds = 0.0
        # Of matched prompts whose delivered tokens are known, a part of the `known` ones: their tokens, those available,
        # routed and delivered, and those routed of requests that counted on one under way
        self.matched = self.available = self.routed = self.matched_delivered = self.in_flight = 0

    def finished(self, code: int, seconds: float | None) -> None:
        """Counts the request; `seconds` is None where it never arrived whole."""
        self.codes[code] = self.codes.get(code, 0) + 1
        if seconds is not None:
            self.duration.observe(seconds)

    def used(self, usage: Usage, prefill_rate: float | None = None) -> None:
        """Counts what the engine reports. What it does not say is not counted as zero. `prefill_rate` in tokens a second."""
        if usage.cached is None:
            self.unknown += usage.prompt or 0
        else:
            self.known += usage.prompt or 0
            self.cached += usage.cached
            if prefill_rate is None:
                self.unrated += usage.cached
            else:
                self.saved_seconds += usage.cached / prefill_rate
        self.output += usage.output or 0


class GatewayMetrics(Collector):
    """All families, on a registry that the caller gives, so that each test and each gateway has its own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._series: dict[tuple[str, str, str], Series] = {}
        self._rejected: dict[str, int] = {}
        registry.register(self)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ("replica",), registry=registry)

        self.inflight = gauge("kvgate_inflight_requests", "Requests that a replica is answering.")
        self.replica_up = gauge("kvgate_replica_up", "1 while the replica answers its health check.")
        self.breaker_open = gauge(
            "kvgate_breaker_open", "1 while a replica gets no requests but probes, because it kept failing."
        )
        self.kv_utilization = gauge(
            "kvgate_kv_utilization_ratio",
            "KV blocks in use by running requests / all blocks, as the engine reports. Cached, unused blocks count as free.",
        )
        self.kv_cached = gauge(
            "kvgate_kv_cached_ratio",
            "KV blocks that hold a reusable prefix / all blocks, from KV events; in use or not.",
        )
        self.kv_event_gaps = Counter(
            "kvgate_kv_event_gaps",
            "Runs of missing KV events, whether they could be replayed or not.",
            ("replica",),
            registry=registry,
        )
        self.prediction_error = gauge(
            "kvgate_prediction_error_tokens",
            "Predicted - delivered prompt tokens, running mean over the replica's requests; without those that wait for a twin.",
        )
        self.hits_missing = gauge(
            "kvgate_hits_missing", "1 while hits are expected of the replica and it delivers none at all."
        )
        self.retries = Counter(
            "kvgate_retries",
            "Requests sent again, before their first byte, after this replica failed.",
            ("replica",),
            registry=registry,
        )

    def watch_queue(self, waiting: Callable[[], int], oldest_age: Callable[[], float]) -> None:
        """Shows the admission queue."""
        text = "Requests that wait for a place at an engine."
        Gauge("kvgate_queue_requests", text, registry=self.registry).set_function(waiting)
        text = "Seconds that the oldest waiting request has waited."
        Gauge("kvgate_queue_age_seconds", text, registry=self.registry).set_function(oldest_age)

    def series(self, route: str, model: str, tenant: str) -> Series:
        """The series of these labels. `model` is a served name or OTHER: nothing that a client invents."""
        key = (route, model, tenant)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = Series(*key)
        return series

    @property
    def every_series(self) -> list[Series]:
        """Those of which a request has finished: one is made before it is known whose the request is."""
        return [series for series in self._series.values() if series.codes]

    def rejected(self, reason: str) -> None:
        """Counts a request that the gateway did not let through for want of something. `reason` is one of our own words."""
        self._rejected[reason] = self._rejected.get(reason, 0) + 1

    def drop_replica(self, replica: str) -> None:
        """Ends the series of a replica that is gone: where replicas come and go, their names never end."""
        for metric in (
            self.inflight,
            self.replica_up,
            self.breaker_open,
            self.kv_utilization,
            self.kv_cached,
            self.kv_event_gaps,
            self.prediction_error,
            self.hits_missing,
            self.retries,
        ):
            metric.remove(replica)

    def collect(self) -> Iterator[Metric]:
        """The families of the requests, for a scrape."""
        every = self.every_series
        requests = CounterMetricFamily(
            "kvgate_requests",
            "Finished requests by HTTP status; 499 is a client that left before its answer was complete.",
            labels=("route", "model", "tenant", "code"),
        )
        for series in every:
            for code, count in sorted(series.codes.items()):
                requests.add_metric((*series.labels, str(code)), count)
        yield requests
        rejected = CounterMetricFamily(
            "kvgate_rejected",
            "Requests that were refused for want of a limit's budget, of a place in the queue or of an engine.",
            labels=("reason",),
        )
        for reason, count in sorted(self._rejected.items()):
            rejected.add_metric((reason,), count)
        yield rejected
        yield _histogram(
            "kvgate_ttft_seconds",
            "From the last byte of a streamed request to its first generated content (a role alone is none).",
            (((s.labels[0], s.labels[1]), s.ttft) for s in every),
        )
        yield _histogram(
            "kvgate_request_duration_seconds",
            "From the last byte of a request to the last byte of its answer.",
            (((s.labels[0], s.labels[1]), s.duration) for s in every),
        )
        yield _histogram(
            "kvgate_gateway_overhead_seconds",
            "From the last byte of a request until it was written to an engine: admission, choice, connecting, retries.",
            (((s.labels[0], s.labels[1]), s.overhead) for s in every),
        )
        yield _tokens(
            "kvgate_prompt_tokens",
            "Prompt tokens as the engine reports them; usage=unknown where it did not say how many came from its cache.",
            every,
            "usage",
            {"known": lambda s: s.known, "unknown": lambda s: s.unknown},
        )
        yield _tokens(
            "kvgate_output_tokens",
            "Generated tokens as the engine reports them.",
            every,
            None,
            {"": lambda s: s.output},
        )
        yield _tokens(
            "kvgate_prefix_tokens",
            "Prompt tokens by stage: available on some replica and routed to, as predicted of matched prompts; delivered of all.",
            every,
            "stage",
            {
                "available": lambda s: s.available if s.matched else None,
                "routed": lambda s: s.routed if s.matched else None,
                "delivered": lambda s: s.cached,
            },
        )
        yield _tokens(
            "kvgate_matched_tokens",
            "Of matched prompts alone: all tokens, and those delivered, to compare with the available and routed ones.",
            every,
            "stage",
            {
                "prompt": lambda s: s.matched or None,
                "delivered": lambda s: s.matched_delivered if s.matched else None,
            },
        )
        yield _tokens(
            "kvgate_saved_prefill_seconds",
            "Delivered tokens at the measured prefill rate of the replica that answered: an estimate of what caching saved.",
            every,
            None,
            {"": lambda s: s.saved_seconds},
        )


def _histogram(name: str, text: str, parts: Iterable[tuple[tuple[str, str], Distribution]]) -> HistogramMetricFamily:
    """Summed over tenants: buckets for each of them would be many series for little."""
    sums: dict[tuple[str, str], Distribution] = {}
    for labels, distribution in parts:
        if labels in sums:
            sums[labels].add(distribution)
        else:
            sums[labels] = distribution.copy()
    family = HistogramMetricFamily(name, text, labels=("route", "model"))
    for labels, total in sums.items():
        total.add_to(family, labels)
    return family


def _tokens(
    name: str,
    text: str,
    every: Iterable[Series],
    label: str | None,
    values: dict[str, Callable[[Series], float | None]],
) -> CounterMetricFamily:
    """Summed over routes: what a token counts for does not depend on the path it came by. None is unknown, and not shown."""
    sums: dict[tuple[str, ...], float] = {}
    for series in every:
        for value, count in values.items():
            key = (*series.labels[1:], value) if label else series.labels[1:]
            if (tokens := count(series)) is not None:
                sums[key] = sums.get(key, 0) + tokens
    family = CounterMetricFamily(name, text, labels=("model", "tenant", label) if label else ("model", "tenant"))
    for labels, total in sums.items():
        family.add_metric(labels, total)
    return family
