"""`python -m bench fleet --trace FILE`: the table of docs/results/fleet.md.

Exit code 0 if every bar holds, 1 if one fails or is INVALID, 2 on set-up errors.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import environment, peers
from bench.fleet import arms, ideal, judge, report, trace
from bench.fleet.engines import Engines
from bench.fleet.judge import Ideal, Rate
from bench.fleet.trace import SHRINK, TRACE_BLOCK, Ask
from bench.process import ROOT
from kvgate.errors import SetupError, UsageError
from loadtest.sim.profile import roofline

OUT = ROOT / "docs" / "results" / "fleet.json"
REPLICAS = 8
GPU, MODEL = "h200", "llama-3.1-8b"
FASTER = 3.0  # than that engine
REQUESTS = 1300
LOADS = (0.35, 0.55, 0.75)
DECODE_MS = 5.0
STEP_TOKENS = 8192  # of the engine


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(
        prog="python -m bench fleet", description="Where prompts go: policies on a simulated fleet, by a public trace."
    )
    parse.add_argument("--trace", type=Path, required=True, metavar="FILE", help="JSON lines in Mooncake's format")
    parse.add_argument("--requests", type=int, default=REQUESTS, help=f"of the trace's first (default {REQUESTS})")
    parse.add_argument(
        "--loads", default=",".join(f"{load:g}" for load in LOADS), help="shares of the engines' time, comma-separated"
    )
    parse.add_argument("--policies", default=",".join(arms.LAUNCHES), help="comma-separated; all unless given")
    parse.add_argument("--faster", type=float, default=FASTER, help="engines and arrivals, than real ones")
    parse.add_argument("--out", type=Path, default=OUT, help="JSON file; the Markdown page lies beside it as .md")
    return parse


def fleet(faster: float) -> Engines:
    """Eight of the real engine, shrunk."""
    profile = roofline(GPU, MODEL)
    assert profile.kv_tokens is not None
    prefill = round(faster / profile.token_s / SHRINK, 1)
    return Engines(REPLICAS, profile.kv_tokens // TRACE_BLOCK, prefill, DECODE_MS, STEP_TOKENS // SHRINK)


def hits(asks: Sequence[Ask], engines: Engines) -> Ideal:
    everything = sum(len(ask.blocks) + -(-ask.output // trace.BLOCK) + 1 for ask in asks)
    return Ideal(
        sum(ask.tokens for ask in asks),
        ideal.delivered(asks, engines.count * engines.blocks),
        ideal.delivered(asks, everything),
    )


def main(words: Sequence[str]) -> int:
    given = parser().parse_args(words)
    loads, policies = _loads(given.loads), _policies(given.policies)
    if given.requests < 1 or given.faster <= 0:
        raise UsageError("--requests and --faster: more than 0")
    if not sys.platform.startswith("linux"):
        raise SetupError("The benchmark pins cores: it runs on Linux only.")
    asks = trace.read(given.trace, given.requests)
    cores = environment.two_cores()
    page = given.out.with_suffix(".md")
    where = environment.describe(*cores, (), [given.out, page])
    where["realtime"] = os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)
    where["versions"] |= {
        name: version for name, version in peers.versions().items() if any(name in p for p in policies)
    }
    engines, best = fleet(given.faster), hits(asks, fleet(given.faster))
    capacity = engines.count * engines.prefill
    rates = []
    for load in loads:
        seconds = (best.prompts - best.pooled) / capacity / load
        rates.append(Rate(load, asks[-1].at / seconds, seconds))
    for rate in rates:
        for policy in policies:
            with tempfile.TemporaryDirectory(prefix="kvgate-fleet-") as folder:
                try:
                    arm = arms.run(policy, asks, rate.speed, engines, Path(folder), cores)
                except SetupError as error:
                    if policy.startswith("kvgate/"):
                        raise
                    rate.absent[policy] = str(error)
                    say(f"load {rate.load:g}, {policy}: {error}")
                    continue
            rate.arms[policy] = arm
            say(f"load {rate.load:g}, {policy}: {_line(judge.figures(arm, best, engines.prefill))}")
    tokens = [ask.tokens for ask in asks]
    judged = judge.bars(rates, best, engines.prefill, tokens)
    document = report.document(rates, best, judged, _given(given, asks, engines), where, tokens)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(document, indent=1) + "\n")
    page.write_text(report.markdown(document))
    for bar in judged:
        print(bar)
    say(f"wrote {given.out} and {page}")
    return 0 if document["verdict"] == "pass" else 1


def _given(given: argparse.Namespace, asks: Sequence[Ask], engines: Engines) -> dict[str, Any]:
    profile = roofline(GPU, MODEL)
    return {
        "trace": given.trace.name,
        "sha256": hashlib.sha256(given.trace.read_bytes()).hexdigest(),
        "requests": len(asks),
        "trace_minutes": round(asks[-1].at / 60, 2),
        "replicas": engines.count,
        "profile": profile.name,
        "kv_tokens": profile.kv_tokens,
        "real_prefill_tokens_per_s": round(1 / profile.token_s, 1),
        "faster": given.faster,
        "blocks": engines.blocks,
        "prefill_tokens_per_s": engines.prefill,
        "decode_ms": engines.decode_ms,
        "step_tokens": engines.step_tokens,
    }


def _line(figures: Any) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in figures.items())


def _loads(text: str) -> list[float]:
    try:
        loads = sorted(float(load) for load in text.split(","))
    except ValueError:
        loads = []
    if not loads or loads[0] <= 0:
        raise UsageError(f"--loads {text}: give numbers above 0, as in 0.4,0.8")
    return loads


def _policies(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in arms.LAUNCHES]
    if unknown:
        raise UsageError(f"--policies: {', '.join(unknown)} is not one of {', '.join(arms.LAUNCHES)}")
    return names
