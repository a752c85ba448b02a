"""The two tables that can be measured: which targets, phases and bars each has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from bench import peers
from bench.process import ROOT
from bench.stats import Bar
from bench.targets import Direct, Kvgate, Launch, Nginx

RESULTS = ROOT / "docs" / "results"


@dataclass(frozen=True, slots=True)
class Suite:
    """`phases` are those that run unless others are named; `backends` is how many upstreams a target has."""

    name: str
    title: str
    targets: Mapping[str, Launch]
    phases: tuple[str, ...]
    bars: tuple[Bar, ...]
    backends: int
    out: Path
    faulted: str | None = None  # the target that has to bear failing engines; all of them are tried then
    notes: str = ""


OVERHEAD = Suite(
    name="overhead",
    title="What the gateway costs on top of the engine",
    targets=MappingProxyType({"direct": Direct, "nginx": Nginx, "kvgate": Kvgate}),
    phases=("small-c1", "small-c16", "small-c64", "large-c16", "streams-c100"),
    bars=(
        Bar("CPU per small request", "small-c1", 7.5),
        Bar("CPU per small request", "small-c16", 7.5),
        Bar("CPU per small request", "small-c64", 7.5),
        Bar("CPU per chunk", "streams-c100", 3.0),
    ),
    backends=1,
    out=RESULTS / "gateway-overhead.json",
)

OURS, PEER = "kvgate/round-robin", "vllm-router/round_robin"
PEERS = Suite(
    name="peers",
    title="What kvgate and other routers cost on top of the engine",
    targets=MappingProxyType(
        {"direct": Direct, "nginx": Nginx, OURS: partial(Kvgate, policy="round-robin"), **peers.launches()}
    ),
    phases=("small-c16", "large-c16", "streams-c100"),
    bars=(
        Bar("CPU per small request", "small-c16", 1.0, OURS, PEER),
        Bar("CPU per 32 KB request", "large-c16", 1.0, OURS, PEER),
        Bar("CPU per chunk", "streams-c100", 1.0, OURS, PEER, tie=8.0),
        # direct's is taken from both sides, so that the whole compares as what is added does
        Bar("added TTFT p50", "streams-c100", 1.0, OURS, PEER, figure="ttft_p50_ms"),
    ),
    backends=2,
    out=RESULTS / "peers.json",
    faulted=OURS,
    notes=(
        "Each prompt ends uniquely and belongs to one of 64 prefix groups. Every request carries a key. Each peer runs with its "
        "defaults but for policy, ports and a log level of warnings. vllm-router's cache_aware asks every engine to render the "
        "prompt first; the upstream answers that with 404, as engines without that route do. LiteLLM chooses at random and "
        "rewrites what it passes on, so only the text of its answers is compared. production-stack's version is its commit."
    ),
)

SUITES: Mapping[str, Suite] = MappingProxyType({suite.name: suite for suite in (OVERHEAD, PEERS)})
