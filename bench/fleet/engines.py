"""The fleet: `kvgate sim`, half of the engines in a process on each core; and what they say they did."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import payloads
from bench.fleet.toy import write_folder
from bench.fleet.trace import BLOCK
from bench.process import LOOPBACK, Child, fetch, free_ports
from loadtest.exposition import samples, total

COUNTERS: Mapping[str, str] = {
    "prompt": "vllm:prompt_tokens_total",
    "cached": "vllm:prompt_tokens_cached_total",
    "requests": "vllm:request_queue_time_seconds_count",
    "preemptions": "vllm:num_preemptions_total",
    "late_s": "sim:late_seconds_total",
}


@dataclass(frozen=True, slots=True)
class Engines:
    """What each of them is. blocks: of 16 tokens, the null block not counted. prefill: tokens a second. decode_ms: of a step
    without prompts."""

    count: int
    blocks: int
    prefill: float
    decode_ms: float
    step_tokens: int

    def command(self, model: Path, events: Path, port: int, count: int) -> list[str]:
        words: dict[str, object] = {
            "--port": port,
            "--replicas": count,
            "--model": model,
            "--served-model-name": payloads.MODEL,
            "--kv-events-dir": events,
            "--block-size": BLOCK,
            "--kv-tokens": (self.blocks + 1) * BLOCK,
            "--prefill-tokens-per-s": self.prefill,
            "--decode-ms": self.decode_ms,
            "--max-batched-tokens": self.step_tokens,
        }
        return [sys.executable, "-m", "kvgate", "sim", *(str(word) for option in words.items() for word in option)]


@contextmanager
def running(engines: Engines, folder: Path, cores: Sequence[int]) -> Iterator[list[int]]:
    """Their ports; `count` is a multiple of the number of cores. SetupError if one does not get ready."""
    folder.mkdir(parents=True)
    model, events, first = write_folder(folder / "model"), folder / "events", free_ports(engines.count)
    ports = list(range(first, first + engines.count))
    share = engines.count // len(cores)
    with ExitStack() as stack:
        for number, core in enumerate(cores):
            command = engines.command(model, events, ports[number * share], share)
            child = Child(f"the fleet (kvgate sim) on core {core}", command, core, folder / f"log-{number}")
            stack.callback(child.stop)
            for port in ports[number * share : (number + 1) * share]:
                child.wait_until_ready(port, "/health")
        yield ports


Counts = dict[str, float]


def counts(port: int) -> Counts:
    """One engine's counters so far, under the names of COUNTERS."""
    status, page = fetch(port, "GET", "/metrics")
    found = list(samples(page.decode()))
    totals = {name: total(found, metric) for name, metric in COUNTERS.items()}
    if status != 200 or None in totals.values():
        raise ValueError(f"the engine at {LOOPBACK}:{port} does not tell what it did")
    return {name: value for name, value in totals.items() if value is not None}


def since(before: Sequence[Counts], ports: Sequence[int]) -> list[Counts]:
    """What each engine did since."""
    return [
        {name: value - then[name] for name, value in counts(port).items()}
        for then, port in zip(before, ports, strict=True)
    ]
