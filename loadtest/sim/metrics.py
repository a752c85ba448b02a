"""The metrics of vLLM 0.32 that a gateway, a load test or a dashboard reads, under their names and labels."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from time import time

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from loadtest.sim.scheduler import Scheduler

REQUEST_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
INTER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
ITERATION = tuple(2**power for power in (0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14))
FINISHES = ("stop", "length", "abort", "error", "repetition")


class Histogram:
    """Plain numbers: an observation costs a tenth of prometheus_client's, and there is one for every token."""

    __slots__ = ("_bounds", "_counts", "_sum", "name", "text")

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name, self.text = name, text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """(upper bound, how many are at most that), and the sum."""
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True)), self._sum


class Metrics(Collector):
    """Of one engine. model: the served name. info: the labels of vllm:cache_config_info besides the engine."""

    def __init__(self, model: str, max_model_len: int, info: Mapping[str, object], scheduler: Scheduler) -> None:
        self.finished = dict.fromkeys(FINISHES, 0)
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self._started = time()  # seconds since the epoch
        self.late_s = 0.0  # what steps took beyond their time: this machine was too slow for the profile
        tokens = [base * 10**power for power in range(8) for base in (1, 2, 5) if base * 10**power <= max_model_len]
        self.iteration = Histogram("iteration_tokens_total", "Tokens in an engine step.", ITERATION)
        self.ttft = Histogram("time_to_first_token_seconds", "Time to first token.", FIRST_TOKEN)
        self.itl = Histogram("inter_token_latency_seconds", "Time between tokens.", INTER_TOKEN)
        self.tpot = Histogram("request_time_per_output_token_seconds", "Mean time per token.", INTER_TOKEN)
        self.e2e = Histogram("e2e_request_latency_seconds", "From arrival to the end.", REQUEST_LATENCY)
        self.queue = Histogram("request_queue_time_seconds", "Waiting.", REQUEST_LATENCY)
        self.inference = Histogram("request_inference_time_seconds", "Running.", REQUEST_LATENCY)
        self.prefill = Histogram("request_prefill_time_seconds", "Prefill.", REQUEST_LATENCY)
        self.decode = Histogram("request_decode_time_seconds", "Decode.", REQUEST_LATENCY)
        self.request_prompt = Histogram("request_prompt_tokens", "Prompt tokens.", tokens)
        self.request_output = Histogram("request_generation_tokens", "Generated tokens.", tokens)
        self.request_computed = Histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens less cached ones.", tokens
        )
        self._labels = {"model_name": model, "engine": "0"}
        self._info = {**{name: str(value) for name, value in info.items()}, "engine": "0"}
        self._scheduler = scheduler
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        scheduler = self._scheduler
        waiting = len(scheduler.waiting)
        yield self._gauge("num_requests_running", "Requests that run.", len(scheduler.running))
        yield self._gauge("num_requests_waiting", "Requests that wait.", waiting)
        yield self._gauge(
            "num_requests_waiting_by_reason", "Waiting requests.", {"capacity": waiting, "deferred": 0}, "reason"
        )
        usage = scheduler.cache.pool.usage
        yield self._gauge("kv_cache_usage_perc", "Blocks that requests hold; 1 means 100 percent.", usage)
        lookups = scheduler.lookups
        yield self._counter("prefix_cache_queries", "Prefix cache queries, in tokens.", lookups.queries)
        yield self._counter("prefix_cache_hits", "Prefix cache hits, in tokens.", lookups.hits)
        yield self._counter("num_preemptions", "Preemptions.", scheduler.preemptions)
        yield self._counter("prompt_tokens", "Prefill tokens processed.", self.prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Cached prompt tokens.", self.cached_tokens)
        sources = {"local_compute": self.prompt_tokens - self.cached_tokens, "local_cache_hit": self.cached_tokens}
        sources["external_kv_transfer"] = 0
        yield self._counter("prompt_tokens_by_source", "Prompt tokens, by where they came from.", sources, "source")
        yield self._counter("generation_tokens", "Generation tokens processed.", self.generated_tokens)
        yield self._counter("request_success", "Finished requests.", self.finished, "finished_reason")
        for histogram in (value for value in vars(self).values() if isinstance(value, Histogram)):
            family = HistogramMetricFamily(f"vllm:{histogram.name}", histogram.text, labels=tuple(self._labels))
            buckets, total = histogram.buckets()
            family.add_metric(tuple(self._labels.values()), buckets, total)
            yield family
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=tuple(self._info)
        )
        info.add_metric(tuple(self._info.values()), 1)
        yield info
        yield GaugeMetricFamily("process_start_time_seconds", "Start time of the process.", self._started)
        yield CounterMetricFamily("sim:late_seconds", "Seconds that steps took beyond their profile.", self.late_s)

    def _gauge(self, name: str, text: str, values: float | Mapping[str, float], label: str = "") -> Metric:
        return self._fill(GaugeMetricFamily(f"vllm:{name}", text, labels=self._names(label)), values)

    def _counter(self, name: str, text: str, values: float | Mapping[str, float], label: str = "") -> Metric:
        return self._fill(CounterMetricFamily(f"vllm:{name}", text, labels=self._names(label)), values)

    def _names(self, label: str) -> tuple[str, ...]:
        return (*self._labels, label) if label else tuple(self._labels)

    def _fill(
        self, family: GaugeMetricFamily | CounterMetricFamily, values: float | Mapping[str, float]
    ) -> GaugeMetricFamily | CounterMetricFamily:
        """values: one number, or one for each value of the extra label."""
        common = tuple(self._labels.values())
        if isinstance(values, Mapping):
            for value, number in values.items():
                family.add_metric((*common, value), number)
        else:
            family.add_metric(common, values)
        return family


def cache_info(
    *, block_size: int, blocks: int, max_model_len: int, prefix_caching: bool, algorithm: str
) -> dict[str, object]:
    """Labels of vllm:cache_config_info, those that say something of this cache."""
    return {
        "block_size": block_size,
        "cache_dtype": "auto",
        "enable_prefix_caching": prefix_caching,
        "gpu_memory_utilization": 0.92,
        "is_attention_free": False,
        "num_gpu_blocks": blocks,
        "num_cpu_blocks": None,
        "prefix_caching_hash_algo": algorithm,
        "sliding_window": None,
        "user_specified_block_size": True,
        "kv_cache_size_tokens": blocks * block_size,
        "kv_cache_max_concurrency": blocks * block_size / max_model_len,
        "hash_block_size": None,
        "cache_hit_alignment_tokens": None,
        "kv_cache_memory_bytes": None,
    }
