"""Puts the page together: verdict, gains, plots, numbers, gates, and what was run on what."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from loadtest.outcome import Outcome
from loadtest.report import plots
from loadtest.report.style import CSS
from loadtest.report.tables import gates, numbers, setting
from loadtest.run import Run

Document = dict[str, Any]


def render(result: Document, run: Run) -> str:
    """A whole HTML document without a reference to anything outside it."""
    body = "".join(
        [
            "<h1>What prefix caching gains here</h1>",
            _verdict(result),
            _cards(result),
            f"<p class='soft'>{escape(_what(result))}</p>",
            "<h2>Plots</h2><p class='soft'><span class='key off'></span>cache off or cold"
            "<span class='key on'></span>cache on or warm</p>",
            f"<div class='plots'>{''.join(_figures(run))}</div>",
            "<h2>Numbers</h2>",
            numbers(result),
            "<h2>Why this may be believed</h2>" if result["valid"] else "<h2>Checks</h2>",
            gates(result),
            "<h2>What was run</h2>",
            setting(result),
        ]
    )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>kvgate load test: {_word(result)}</title><style>{CSS}</style></head><body>{body}</body></html>\n"
    )


def _word(result: Document) -> str:
    return "VALID" if result["valid"] else "INVALID"


def _verdict(result: Document) -> str:
    if result["valid"]:
        count = sum(gate["status"] == "pass" for gate in result["gates"])
        return f"<div class='verdict'><b>VALID</b><p>{count} checks passed, none failed.</p>{_withheld(result)}</div>"
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in result["reasons"])
    return (
        "<div class='verdict invalid'><b>INVALID</b><p>Do not use the numbers on this page.</p>"
        f"<ul>{reasons}</ul>{_withheld(result)}</div>"
    )


def _withheld(result: Document) -> str:
    return "".join(f"<p>Withheld: {escape(text)}</p>" for text in result["withheld"])


def _cards(result: Document) -> str:
    unloaded, loaded, cached = result["unloaded"], result["loaded"], result["cached_tokens"]
    cards: list[tuple[str, str, str]] = []
    if unloaded and unloaded["ttft_reduction"] is not None:
        cold, warm = unloaded["ttft_cold_ms"]["p50"], unloaded["ttft_warm_ms"]["p50"]
        detail = f"TTFT p50 {cold:,.0f} ms cold, {warm:,.0f} ms warm, one request at a time; measured"
        cards.append((f"−{unloaded['ttft_reduction']:.1%}", "time to first token, warm prefix", detail))
    if loaded and loaded["throughput_gain"] is not None:
        off, on = loaded["off"]["requests_per_s"], loaded["on"]["requests_per_s"]
        detail = f"{off:.2f} requests/s off, {on:.2f} on; measured"
        cards.append((f"{loaded['throughput_gain']:.2f}×", "throughput under load", detail))
    if loaded and loaded["ttft_gain"] is not None:
        off, on = loaded["off"]["ttft_ms"]["p50"], loaded["on"]["ttft_ms"]["p50"]
        detail = f"TTFT p50 {off:,.0f} ms off, {on:,.0f} ms on; measured"
        cards.append((f"{loaded['ttft_gain']:.2f}×", "shorter TTFT under load", detail))
    if cached["ratio"] is not None:
        detail = (
            f"{cached['delivered']:,} tokens (reported by the engine) of {cached['ceiling']:,} (computed from the plan)"
        )
        cards.append((f"{cached['ratio']:.1%}", "of the tokens that could hit did", detail))
    inner = "".join(
        f"<div class='card'><div class='n'>{n}</div><div>{what}</div><small>{escape(detail)}</small></div>"
        for n, what, detail in cards
    )
    return f"<div class='cards'>{inner}</div>"


def _what(result: Document) -> str:
    """The workload in one sentence, so that nobody takes the gain for another one's."""
    sentences = []
    shapes = result["workload"]["phases"]
    if "loaded" in shapes:
        s = shapes["loaded"]
        turns = f" of {s['turns']} turns" if s["turns"] > 1 else ""
        sentences.append(
            f"The load: {s['groups']} prefixes of {s['prefix_tokens']:,} tokens, each shared by {s['sessions']} sessions"
            f"{turns}, {s['suffix_tokens']} new tokens and {s['output_tokens']} output tokens a turn."
        )
    sentences.append(
        "Long shared prefixes with short answers are where prefix caching gains most; without a shared prefix it gains "
        "nothing. Cache off is a fresh cache_salt for each request on the same engine."
    )
    return " ".join(sentences)


def _figures(run: Run) -> Iterator[str]:
    cold, warm = (_ttfts(run.of("unloaded", arm)) for arm in ("off", "on"))
    if cold and warm:
        yield _figure("TTFT of single requests, cold and warm", plots.ttft_strips(cold, warm))
    arms = {str(arm): _ttfts(run.of("loaded", arm)) for arm in run.arms}
    arms = {arm: values for arm, values in arms.items() if values}
    if arms:
        yield _figure("TTFT under load: share of requests at or below", plots.ttft_cdf(arms))
    blocks = [block for block in run.blocks if block.phase == "loaded" and block.outcomes]
    if blocks:
        yield _figure("Throughput in each block of time", plots.block_bars(blocks))
    for arm in run.arms:
        block = next((b for b in blocks if b.arm == arm), None)
        if block is not None:
            yield _figure(
                f"Requests of the first block with cache {arm}: waiting (light), answering (full)",
                plots.timeline(block),
            )


def _ttfts(outcomes: list[Outcome]) -> list[float]:
    return [o.service_ttft_ms for o in outcomes if o.ok and o.service_ttft_ms is not None]


def _figure(title: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"
