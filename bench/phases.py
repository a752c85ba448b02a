"""The phases, and one measurement of one target in one of them."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

from bench import payloads, upstreams, wrk
from bench.cpu import core_busy_seconds, pinned, tree_cpu_seconds, tree_rss_mb
from bench.process import ROOT, fetch
from bench.stats import cpu_us
from bench.targets import Target
from kvgate.errors import SetupError


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure. `seconds` for each run of wrk, `repeat` streams on each connection."""

    rounds: int
    seconds: float
    repeat: int


@dataclass(slots=True)
class Sample:
    """One round. `figures` carry their unit in the name; `faults` make the phase INVALID.

    `late` says that nothing failed but the pace was not kept: a busy machine does that, and so does a slow target.
    """

    figures: dict[str, float | None]
    faults: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)


class Bench:
    """The machine's share of a run: cores, a private folder, and serial numbers that never repeat."""

    def __init__(self, folder: Path, load_core: int, gateway_core: int) -> None:
        self.folder, self.load_core, self.gateway_core = folder, load_core, gateway_core
        self._serial = 0

    def serials(self, count: int) -> int:
        """The first of `count` unused serial numbers."""
        first, self._serial = self._serial, self._serial + count
        return first

    def watch(self, target: Target, work: Callable[[], int]) -> dict[str, float | None]:
        """CPU of the target per operation while `work` runs, which returns how many operations it did."""
        pid = target.pid
        busy, own = core_busy_seconds(self.gateway_core), tree_cpu_seconds(pid) if pid else 0.0
        began = time.perf_counter()
        operations = work()
        seconds = time.perf_counter() - began
        busy = core_busy_seconds(self.gateway_core) - busy
        own = tree_cpu_seconds(pid) - own if pid else 0.0
        return {
            "cpu_us": cpu_us(own, operations) if pid else None,
            "cpu_share": own / seconds if pid else None,
            "others_cpu_share": max(0.0, busy - own) / seconds,
            "rss_mb": tree_rss_mb(pid) if pid else None,
        }


class Phase(ABC):
    name: str
    operation: ClassVar[str]  # what CPU is counted for

    @property
    @abstractmethod
    def upstream(self) -> upstreams.Start:
        """How what stands for an engine is started."""

    @abstractmethod
    def warm(self, bench: Bench, target: Target) -> None:
        """A short run that opens connections and fills caches. Not measured."""

    @abstractmethod
    def measure(self, bench: Bench, target: Target, ports: Sequence[int], effort: Effort) -> Sample:
        """One round. `ports` are the upstreams'."""


@dataclass(frozen=True, slots=True)
class Requests(Phase):
    """Closed loop of non-streamed chat requests of `size` bytes, `concurrency` at a time."""

    name: str
    concurrency: int
    size: int
    operation: ClassVar[str] = "request"

    @property
    def upstream(self) -> upstreams.Start:
        return upstreams.answering

    def warm(self, bench: Bench, target: Target) -> None:
        self._load(bench, target, 1.0)

    def measure(self, bench: Bench, target: Target, ports: Sequence[int], effort: Effort) -> Sample:
        faults = self._inspect(bench, target)
        before = [upstreams.served(port) for port in ports]
        loads: list[wrk.Load] = []

        def work() -> int:
            loads.append(self._load(bench, target, effort.seconds))
            return loads[0].requests

        figures = bench.watch(target, work)
        load = loads[0]
        each = [upstreams.served(port) - count for port, count in zip(ports, before, strict=True)]
        seen = sum(each)
        faults += [f"{count} x {kind} error" for kind, count in load.failures.items()]
        if load.requests == 0:
            faults.append("no request answered")
        # health checks and what was in flight at the end come on top; more is duplicated work, fewer is invented answers
        most = load.requests + self.concurrency + len(ports) * 20 * (load.seconds + 1)
        if seen < load.requests or (target.once and seen > most):
            faults.append(f"{load.requests} requests answered, {seen} reached the upstream")
        figures |= {"count": load.requests, "per_s": load.requests / load.seconds}
        if len(ports) > 1 and target.pid is not None and load.requests:
            figures |= {"upstream_requests": seen / load.requests, "smaller_share": min(each) / seen if seen else None}
        return Sample(figures | {"p50_ms": load.p50_ms, "p99_ms": load.p99_ms}, faults)

    def _load(self, bench: Bench, target: Target, seconds: float) -> wrk.Load:
        template = bench.folder / f"body-{self.size}"
        template.write_text(payloads.request_template(self.size))
        first = bench.serials(10_000_000)
        return wrk.run(target.url, template, self.concurrency, seconds, first, bench.load_core)

    def _inspect(self, bench: Bench, target: Target) -> list[str]:
        """wrk sees only statuses, so one request of each round is looked at whole."""
        body = payloads.filled(payloads.request_template(self.size), bench.serials(1))
        try:
            status, answer = fetch(target.port, "POST", payloads.CHAT, body, key=payloads.KEY)
        except (OSError, http.client.HTTPException) as error:
            return [f"a request failed: {type(error).__name__}"]
        if status != 200:
            return [f"a request got status {status}"]
        same = answer == payloads.answer() if target.exact else payloads.text_of(answer) == payloads.TEXT
        return [] if same else ["an answer is not the upstream's"]


@dataclass(frozen=True, slots=True)
class Streams(Phase):
    """`concurrency` streams at a time, 64 chunks each, one every 10 ms; every stream is checked."""

    name: str
    concurrency: int
    operation: ClassVar[str] = "chunk"

    @property
    def upstream(self) -> upstreams.Start:
        return upstreams.pacing

    def warm(self, bench: Bench, target: Target) -> None:
        self._load(bench, target, 1)

    def measure(self, bench: Bench, target: Target, ports: Sequence[int], effort: Effort) -> Sample:
        seen: dict[str, float | None] = {}
        faults: list[str] = []

        def work() -> int:
            said = self._load(bench, target, effort.repeat)
            faults.extend(f"{count} x {kind}" for kind, count in said.pop("failures").items())
            altered = said.pop("altered")
            if altered and target.exact:
                faults.append(f"{altered} x other bytes than the upstream's")
            seen.update(said)
            return int(seen["chunks"] or 0)

        figures = bench.watch(target, work)
        return Sample(figures | seen, faults, self._late(target, seen))

    def _late(self, target: Target, seen: dict[str, float | None]) -> list[str]:
        """Cheap because it was late, or held back and sent in lumps, is not cheap."""
        late = []
        ideal = payloads.STREAM_PERIOD_MS * (payloads.STREAM_CHUNKS - 1)
        if (duration := seen["duration_p50_ms"]) is not None and duration > 1.2 * ideal:
            what = "the load side falls behind" if target.pid is None else "streams fall behind"
            late.append(f"{what}: {duration:.0f} ms a stream at p50, {ideal} is the pace")
        if (reads := seen["reads_per_chunk"]) is not None and reads < 0.5:
            late.append(f"chunks come in lumps: {reads} reads a chunk")
        return late

    def _load(self, bench: Bench, target: Target, repeat: int) -> dict[str, Any]:
        first = bench.serials(self.concurrency * repeat)
        numbers = (target.port, self.concurrency, repeat, first)
        command = [sys.executable, "-m", "bench.streams", *map(str, numbers)]
        limit = repeat * 5 + 60
        with pinned(bench.load_core):
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit, cwd=ROOT)
        if done.returncode != 0:
            raise SetupError(f"The stream client failed with exit code {done.returncode}.\n{done.stderr[-2000:]}")
        return cast(dict[str, Any], json.loads(done.stdout))


PHASES: tuple[Phase, ...] = (
    Requests("small-c1", 1, 290),
    Requests("small-c16", 16, 290),
    Requests("small-c64", 64, 290),
    Requests("large-c16", 16, 32767),
    Streams("streams-c100", 100),
)
