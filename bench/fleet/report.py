"""The result as a JSON document and as a Markdown page. Both are made from the same values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.fleet import judge
from bench.fleet.arms import Arm
from bench.fleet.judge import Bar, Ideal, Rate
from bench.fleet.trace import SHRINK, TRACE_BLOCK

SCHEMA = 1
COLUMNS: Mapping[str, tuple[str, str]] = {
    "delivered_of_ideal": ("delivered / ideal", ".3f"),
    "hit_share": ("hit share", ".1%"),
    "ttft_p50_ms": ("TTFT p50 ms", ",.0f"),
    "ttft_p90_ms": ("p90", ",.0f"),
    "ttft_p99_ms": ("p99", ",.0f"),
    "succeeded": ("success", ".2%"),
    "busiest_used": ("busiest replica", ".0%"),
    "computed_tokens_max_over_mean": ("computed tokens, max / mean", ".2f"),
    "requests_max_over_mean": ("requests, max / mean", ".2f"),
    "send_lag_p99_ms": ("send lag p99 ms", ".1f"),
    "engines_late_share": ("engines late", ".1%"),
}

NOTES = """\
**Replayed**: the first {requests:,} requests of `{trace}` (sha256 {short}…), {trace_minutes:.1f} minutes. Its times are
rounded to 3 s; each is put anywhere in its 3 s, by a seed. A request is sent when it is due, whatever became of others; TTFT
counts from then. Each policy begins with empty caches.

**Scale**: an engine is one {profile}, as a roofline estimates it: {kv_tokens:,} tokens of KV memory and
{real_prefill_tokens_per_s:,.0f} prompt tokens a second. For this machine a block of {trace_block} tokens becomes one of {block},
and prompts, answers, the budget of a step ({step_tokens} tokens) and the memory ({blocks:,} blocks an engine) shrink alike, by
{shrink}: capacity over working set is kept, and with it every hit and eviction of the trace. Engines and arrivals are {faster:g}
times as fast ({prefill_tokens_per_s:,.0f} short tokens a second), so times here are to be multiplied by {faster:g}. Not to scale:
the time of a step without prompts ({decode_ms:g} ms), the time that routers take, and kvgate's constants that are seconds.

**Ideal**: one cache of the fleet's total size, and the same requests one after the other: {pooled:.1%} of the prompts' tokens
hit. An endless cache: {endless:.1%}. *Load* is the share of their time for which the engines would compute prompts with the
ideal's hits. *Busiest replica*: the prompt tokens that it computed, over what it could have computed until the last request was
due. kvgate/session gets the trace's conversations named in `x-session-id`; every policy gets the same bytes. Peers run with
their defaults; vllm-router's cache_aware has every engine tokenise each prompt first, which costs this machine CPU, too."""


def document(
    rates: Sequence[Rate],
    ideal: Ideal,
    judged: Sequence[Bar],
    given: Mapping[str, Any],
    where: Mapping[str, Any],
    tokens: Sequence[int],
) -> dict[str, Any]:
    """given: what was replayed on what; it has `prefill_tokens_per_s`. tokens: of each prompt."""
    prefill = given["prefill_tokens_per_s"]
    return {
        "schema": SCHEMA,
        "suite": "fleet",
        "environment": dict(where),
        "given": dict(given),
        "ideal": {
            "prompt_tokens": ideal.prompts,
            "pooled_tokens": ideal.pooled,
            "pooled_hit_share": round(ideal.pooled / ideal.prompts, 4),
            "endless_hit_share": round(ideal.endless / ideal.prompts, 4),
        },
        "verdict": judge.verdict(judged),
        "bars": [
            {
                "name": bar.name,
                "measured": None if bar.measured is None else round(bar.measured, 4),
                "limit": bar.limit,
                "verdict": bar.verdict,
                "reasons": list(bar.reasons),
            }
            for bar in judged
        ],
        "rates": [
            {
                "load": rate.load,
                "speed": round(rate.speed, 3),
                "seconds": round(rate.seconds, 2),
                "requests_per_s": round(len(tokens) / rate.seconds, 2),
                "policies": {name: _arm(arm, ideal, prefill, tokens) for name, arm in rate.arms.items()},
                "did_not_start": rate.absent,
            }
            for rate in rates
        ],
    }


def _arm(arm: Arm, ideal: Ideal, prefill: float, tokens: Sequence[int]) -> dict[str, Any]:
    figures = {name: round(value, 4) for name, value in judge.figures(arm, ideal, prefill).items()}
    made: dict[str, Any] = {**figures, "faults": judge.faults(arm, tokens)}
    if any(one["requests"] for one in arm.predictions):
        made["predictions"] = sum(one["requests"] for one in arm.predictions)
        made["predictions_exact"] = sum(one["exact_requests"] for one in arm.predictions)
    return made


def markdown(document: Mapping[str, Any]) -> str:
    """The page of a document."""
    where, given, ideal = document["environment"], document["given"], document["ideal"]
    commit = f"`{(where['commit'] or 'unknown')[:12]}`" + (" with uncommitted changes" if where["dirty"] else "")
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    lines = [
        f"# A fleet of {given['replicas']} simulated engines, a public trace, and where prompts go",
        "",
        f"Measured by `python -m bench fleet --trace FILE` on {where['date']}, commit {commit}, {where['cpu']}, {where['cores']} "
        f"cores, {where['kernel']}, load average at the start {where['load_average_at_start']}"
        f"{', all processes of the run scheduled before others (chrt)' if where['realtime'] else ''}. Versions: {versions}.",
        "",
        *_notes(given, ideal),
        "",
        "| bar | measured | limit | verdict |",
        "|---|---|---|---|",
    ]
    for bar in document["bars"]:
        measured = "unknown" if bar["measured"] is None else f"{bar['measured']:.3f}"
        lines.append(
            f"| {bar['name']} | {measured} | {bar['limit']:g} | {'; '.join([bar['verdict'], *bar['reasons']])} |"
        )
    for rate in document["rates"]:
        lines += [
            "",
            f"## Load {rate['load']:g}: {rate['speed'] / given['faster']:.1f} times the trace's own rate",
            "",
            f"{rate['requests_per_s']:.0f} requests a second here, for {rate['seconds']:.0f} s.",
            "",
            f"| policy | {' | '.join(title for title, _ in COLUMNS.values())} |",
            "|---" * (len(COLUMNS) + 1) + "|",
        ]
        for name, arm in rate["policies"].items():
            lines.append(f"| {name} | {' | '.join(format(arm[key], form) for key, (_, form) in COLUMNS.items())} |")
        for name, arm in rate["policies"].items():
            if "predictions" in arm:
                lines += [
                    "",
                    f"{name} predicted {arm['predictions_exact']:,} of {arm['predictions']:,} hits to the token.",
                ]
            lines += [f"\n**{name}** INVALID: {fault}." for fault in arm["faults"]]
        for name, reason in rate["did_not_start"].items():
            lines += ["", f"**{name}** did not start: {' '.join(reason.split())}"]
    return "\n".join(lines) + "\n"


def _notes(given: Mapping[str, Any], ideal: Mapping[str, Any]) -> list[str]:
    """What was replayed, at which scale, and what the columns mean."""
    return NOTES.format(
        **given,
        short=given["sha256"][:12],
        trace_block=TRACE_BLOCK,
        block=TRACE_BLOCK // SHRINK,
        shrink=SHRINK,
        pooled=ideal["pooled_hit_share"],
        endless=ideal["endless_hit_share"],
    ).splitlines()
