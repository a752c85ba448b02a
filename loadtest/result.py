"""The result document: docs/loadtest-result.schema.json says what each field means. Keys come in a fixed order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

import orjson

from loadtest import provenance
from loadtest.gates import Gate, Status, judge
from loadtest.limits import Limits
from loadtest.outcome import Outcome, ResultClass
from loadtest.percentiles import summary
from loadtest.planfile import load_document, plan_sha256
from loadtest.pressure import growing, offered_share
from loadtest.run import Block, Run
from loadtest.schedule import OpenLoop
from loadtest.truth import ceiling, check_counters, delivered

SCHEMA = "kvgate-loadtest-result/1"
Document = dict[str, Any]


def build(run: Run, limits: Limits, started_at: datetime) -> Document:
    """`started_at` is the wall-clock time of the first request; everything else follows from the run."""
    gates = judge(run, limits)
    reasons = [f"{gate.name}: {gate.detail}" for gate in gates if gate.status is Status.FAIL]
    on = run.of("loaded", "on") or run.of("unloaded", "on")
    return {
        "schema": SCHEMA,
        "valid": not reasons,
        "reasons": reasons,
        "withheld": _withheld(run),
        "started_at": started_at.isoformat(timespec="seconds"),
        "commit": provenance.commit(),
        "hardware": provenance.hardware(),
        "engine": asdict(run.facts),
        "workload": _workload(run),
        "unloaded": _unloaded(run) if "unloaded" in run.plan.shapes else None,
        "loaded": _loaded(run) if "loaded" in run.plan.shapes else None,
        "cached_tokens": _cached(on, run.facts.block_size),
        "gates": [_gate(gate) for gate in gates],
        "limits": asdict(limits),
    }


def to_bytes(document: Document) -> bytes:
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def samples_bytes(run: Run) -> bytes:
    """One line a request: times in ms from the start of its block, tokens, class. The raw material of every number."""
    lines: list[bytes] = []
    for block in run.blocks:
        for o in block.outcomes:
            lines.append(
                orjson.dumps(
                    {
                        "block": o.block,
                        "phase": o.request.phase,
                        "arm": o.arm,
                        "index": o.request.index,
                        "result": o.result.value,
                        "planned_ms": round((o.planned_ns - block.start_ns) / 1e6, 3),
                        "sent_ms": round((o.sent_ns - block.start_ns) / 1e6, 3),
                        "first_ms": None if o.first_ns is None else round((o.first_ns - block.start_ns) / 1e6, 3),
                        "end_ms": round((o.end_ns - block.start_ns) / 1e6, 3),
                        "prompt_tokens": o.prompt_tokens,
                        "completion_tokens": o.completion_tokens,
                        "cached_tokens": o.cached_tokens,
                        "detail": o.detail,
                    }
                )
                + b"\n"
            )
    return b"".join(lines)


def _gate(gate: Gate) -> Document:
    return {"name": gate.name, "status": gate.status.value, "detail": gate.detail}


def _workload(run: Run) -> Document:
    plan = run.plan
    return {
        "seed": plan.seed,
        "vocab": str(plan.vocabulary),
        "plan_sha256": plan_sha256(plan),
        "load": load_document(plan.load),
        "phases": {phase: asdict(shape) for phase, shape in plan.shapes.items()},
    }


def _unloaded(run: Run) -> Document:
    cold, warm = run.of("unloaded", "off"), run.of("unloaded", "on")
    cold_ttft, warm_ttft = _ttft(cold), _ttft(warm)
    return {
        "pairs": len(warm),
        "ttft_cold_ms": cold_ttft,
        "ttft_warm_ms": warm_ttft,
        "ttft_reduction": _rounded(1 - warm_ttft["p50"] / cold_ttft["p50"]) if _both(cold_ttft, warm_ttft) else None,
        "cached_tokens": _cached(warm, run.facts.block_size),
        "results": _classes([*cold, *warm]),
    }


def _loaded(run: Run) -> Document:
    document: Document = {"load": load_document(run.plan.load), "order": [b.arm for b in _loaded_blocks(run)]}
    for arm in ("off", "on"):
        blocks = [b for b in _loaded_blocks(run) if b.arm == arm]
        document[arm] = _arm(run, blocks) if blocks else None
    off, on = document["off"], document["on"]
    document["throughput_gain"] = document["ttft_gain"] = None
    if off and on:
        document["throughput_gain"] = _ratio(on["requests_per_s"], off["requests_per_s"])
        if not _withheld(run):
            document["ttft_gain"] = _ratio(off["ttft_ms"]["p50"], on["ttft_ms"]["p50"])
    document["blocks"] = [_block(b) for b in _loaded_blocks(run)]
    return document


def _arm(run: Run, blocks: Sequence[Block]) -> Document:
    """Percentiles are of answered requests; success_rate and results count all. Throughput is over whole windows."""
    outcomes = [o for block in blocks for o in block.outcomes]
    answered = [o for o in outcomes if o.ok]
    seconds = sum(block.seconds for block in blocks)
    output = [o.completion_tokens for o in answered]
    tokens = None if None in output else sum(t for t in output if t is not None)
    return {
        "requests": len(outcomes),
        "results": _classes(outcomes),
        "success_rate": _rounded(len(answered) / max(len(outcomes), 1)),
        "seconds": _rounded(seconds),
        "requests_per_s": _rounded(len(answered) / seconds) if seconds else None,
        "output_tokens_per_s": _rounded(tokens / seconds) if seconds and tokens is not None else None,
        "ttft_ms": _ttft(outcomes),
        "schedule_ttft_ms": summary([o.schedule_ttft_ms for o in answered if o.schedule_ttft_ms is not None]),
        "send_lag_ms": summary([o.send_lag_ms for o in outcomes]),
        "itl_ms": summary([gap / 1e6 for o in answered for gap in o.itl_ns]),
        "e2e_ms": summary([o.e2e_ms for o in answered]),
        "connections_opened": sum(o.new_connection for o in outcomes),
        "cached_tokens": _cached(outcomes, run.facts.block_size, shared=blocks[0].arm == "on"),
    }


def _block(block: Block) -> Document:
    answered = sum(o.ok for o in block.outcomes)
    return {
        "index": block.index,
        "arm": block.arm,
        "seconds": _rounded(block.seconds),
        "requests_per_s": _rounded(answered / block.seconds) if block.seconds else None,
        "offered_share": _rounded(offered_share(block.outcomes)),
        "queue_grows": growing(block.outcomes),
        "counters": [asdict(c) | {"agrees": c.agrees} for c in check_counters(block)],
    }


def _cached(outcomes: Sequence[Outcome], block_size: int | None, shared: bool = True) -> Document:
    """ceiling: computed from the plan and the engine's block size. delivered: reported by the engine, in the answers."""
    most, found = ceiling(outcomes, block_size) if shared else 0, delivered(outcomes)
    return {
        "ceiling": most,
        "delivered": found,
        "ratio": _rounded(found / most) if most and found is not None else None,
    }


def _withheld(run: Run) -> list[str]:
    if not isinstance(run.plan.load, OpenLoop):
        return []
    past = sorted({str(b.arm) for b in _loaded_blocks(run) if growing(b.outcomes)})
    return [f"loaded.ttft_gain: with prefix caching {arm} the engine is past its capacity" for arm in past]


def _loaded_blocks(run: Run) -> list[Block]:
    return [block for block in run.blocks if block.phase == "loaded"]


def _ttft(outcomes: Sequence[Outcome]) -> Document:
    return summary([o.service_ttft_ms for o in outcomes if o.ok and o.service_ttft_ms is not None])


def _classes(outcomes: Sequence[Outcome]) -> dict[str, int]:
    counts = Counter(o.result for o in outcomes)
    return {kind.value: counts[kind] for kind in ResultClass}


def _both(a: Document, b: Document) -> bool:
    return bool(a["n"] and b["n"] and a["p50"])


def _ratio(over: float | None, under: float | None) -> float | None:
    return _rounded(over / under) if over is not None and under else None


def _rounded(value: float) -> float:
    return round(value, 4)
