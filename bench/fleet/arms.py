"""One policy at one rate: a fresh fleet, a fresh router, the whole replay, and what came of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench import payloads, peers
from bench.cpu import pinned
from bench.fleet import engines, trace
from bench.fleet.engines import Counts, Engines
from bench.fleet.trace import Ask
from bench.process import ROOT, fetch
from bench.targets import Kvgate, Launch
from kvgate.errors import SetupError
from loadtest.percentiles import percentile

COST, ROUND_ROBIN, SESSION = "kvgate/cost", "kvgate/round-robin", "kvgate/session"
PEERS = ("vllm-router/cache_aware", "sglang-router/cache_aware")


class FleetKvgate(Kvgate):
    """The gateway with a policy and nothing else, once it has tested every engine."""

    def options(self) -> list[str]:
        return ["--policy", str(self._policy)]

    def start(self, upstreams: Sequence[int]) -> None:
        super().start(upstreams)
        deadline = time.monotonic() + self.start_seconds
        # the others look at no prompt, and need no test
        while self._policy == "cost" and any(replica["self_test"] is None for replica in self.replicas()):
            if time.monotonic() > deadline:
                raise SetupError(f"{self.name} did not test its engines within {self.start_seconds:g} s.")
            time.sleep(0.1)

    def replicas(self) -> list[dict[str, Any]]:
        """What the gateway knows of each engine."""
        found: list[dict[str, Any]] = json.loads(fetch(self.port, "GET", "/kv/replicas")[1])["replicas"]
        return found


LAUNCHES: Mapping[str, Launch] = MappingProxyType(
    {f"kvgate/{policy}": partial(FleetKvgate, policy=policy) for policy in ("cost", "round-robin", "session")}
    | {name: peers.launches()[name] for name in PEERS}
)


@dataclass(frozen=True, slots=True)
class Arm:
    """One replay. Times in seconds. answers: one for each request, see bench.fleet.load. did: of each engine. routed: the
    gateway's own account of its predictions, empty for others."""

    policy: str
    seconds: float
    answers: list[dict[str, Any]]
    did: list[Counts]
    predictions: list[dict[str, Any]]

    def times(self, name: str) -> list[float]:
        return [answer[name] for answer in self.answers if answer[name] is not None]

    @property
    def succeeded(self) -> float:
        """The share of requests that were answered whole."""
        return sum(answer["end_s"] is not None for answer in self.answers) / len(self.answers)

    @property
    def delivered(self) -> int:
        """Prompt tokens that came from a cache."""
        return sum(answer["cached"] or 0 for answer in self.answers)

    def computed(self) -> list[float]:
        """Prompt tokens that each engine computed."""
        return [did["prompt"] - did["cached"] for did in self.did]

    def used(self, prefill: float) -> list[float]:
        """The share of the replay's time for which each engine computed prompts, at `prefill` tokens a second."""
        return [tokens / prefill / self.seconds for tokens in self.computed()]

    @property
    def late(self) -> float:
        """The share of its time by which the fleet's steps took longer than they should have."""
        return sum(did["late_s"] for did in self.did) / len(self.did) / self.seconds

    def ttft_ms(self, percent: float) -> float:
        return 1000 * percentile(self.times("ttft_s") or [float("nan")], percent)

    def lag_ms(self, percent: float) -> float:
        return 1000 * percentile(self.times("lag_s") or [float("nan")], percent)


def plan(asks: Sequence[Ask], speed: float) -> str:
    """What bench.fleet.load reads: the trace `speed` times as fast."""
    lines = []
    for ask in asks:
        body = {"model": payloads.MODEL, "prompt": trace.text(ask), "max_tokens": ask.output, "ignore_eos": True}
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        lines.append(json.dumps({"due_s": ask.at / speed, "body": json.dumps(body), "session": ask.session}))
    return "\n".join(lines) + "\n"


def run(policy: str, asks: Sequence[Ask], speed: float, fleet: Engines, folder: Path, cores: tuple[int, int]) -> Arm:
    """cores: each has half of the engines, the second the router and the load, too. Raises SetupError where the router does not
    start."""
    router_core = cores[1]
    with engines.running(fleet, folder / "fleet", cores) as ports:
        target = LAUNCHES[policy](folder / "router", router_core)
        try:
            target.start(ports)
            before = [engines.counts(port) for port in ports]
            answers = _replay(target.port, plan(asks, speed), folder, router_core, asks[-1].at / speed)
            predictions = [r["prediction"] for r in target.replicas()] if isinstance(target, FleetKvgate) else []
            return Arm(policy, asks[-1].at / speed, answers, engines.since(before, ports), predictions)
        finally:
            target.stop()


def _replay(port: int, planned: str, folder: Path, core: int, seconds: float) -> list[dict[str, Any]]:
    given, out = folder / "plan", folder / "answers"
    given.write_text(planned)
    with pinned(core):
        done = subprocess.run(
            [sys.executable, "-m", "bench.fleet.load", str(port), str(given), str(out)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds + 120,
        )
    if done.returncode != 0:
        raise SetupError(f"the load side failed with exit code {done.returncode}.\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in out.read_text().splitlines()]
