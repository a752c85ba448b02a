"""The result as a table for a terminal. Each number has its unit; the last column says what kind of number it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Row = tuple[str, str, str, str]


def render(result: dict[str, Any]) -> str:
    lines = [_verdict(result), ""]
    rows = [("", "cache off / cold", "cache on / warm", "kind"), *_rows(result)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for label, off, on, kind in rows:
        lines.append(f"{label:<{widths[0]}}  {off:>{widths[1]}}  {on:>{widths[2]}}  {kind}".rstrip())
    return "\n".join([*lines, "", *_gains(result)])


def _verdict(result: dict[str, Any]) -> str:
    if result["valid"]:
        return "VALID"
    return "\n".join(["INVALID: do not use these numbers", *(f"  {reason}" for reason in result["reasons"])])


def _rows(result: dict[str, Any]) -> Iterator[Row]:
    unloaded, loaded = result["unloaded"], result["loaded"]
    if unloaded:
        cold, warm = unloaded["ttft_cold_ms"], unloaded["ttft_warm_ms"]
        yield "one at a time: TTFT p50", _ms(cold["p50"]), _ms(warm["p50"]), f"measured, n = {cold['n']} + {warm['n']}"
    if loaded:
        off, on = loaded["off"], loaded["on"]
        yield "loaded: throughput", *_pair(off, on, "requests_per_s", "{:.2f} requests/s"), "measured"
        yield "loaded: output", *_pair(off, on, "output_tokens_per_s", "{:.1f} tokens/s"), "measured"
        for name in ("p50", "p99"):
            left, right = (_named((arm or {}).get("ttft_ms", {}), name) for arm in (off, on))
            yield f"loaded: TTFT {name}", left, right, "measured"
        yield "loaded: success", *_pair(off, on, "success_rate", "{:.1%}"), "measured"
    cached = result["cached_tokens"]
    yield "cached tokens, could hit", "", _tokens(cached["ceiling"]), "computed from the plan"
    yield "cached tokens, did hit", "", _tokens(cached["delivered"]), "reported by the engine"


def _gains(result: dict[str, Any]) -> Iterator[str]:
    unloaded, loaded = result["unloaded"], result["loaded"]
    if unloaded and unloaded["ttft_reduction"] is not None:
        yield f"Warm prefix, one request at a time: TTFT is {unloaded['ttft_reduction']:.1%} shorter (measured)"
    if loaded and loaded["throughput_gain"] is not None:
        yield f"Under load: {loaded['throughput_gain']:.2f} x the throughput (measured)"
    if loaded and loaded["ttft_gain"] is not None:
        yield f"Under load: TTFT p50 is {loaded['ttft_gain']:.2f} x shorter (measured)"
    for text in result["withheld"]:
        yield f"Withheld: {text}"
    ratio = result["cached_tokens"]["ratio"]
    if ratio is not None:
        yield f"Of the tokens that could hit, {ratio:.1%} did (reported by the engine)"


def _pair(off: dict[str, Any] | None, on: dict[str, Any] | None, key: str, form: str) -> tuple[str, str]:
    left, right = (("–" if arm is None or arm[key] is None else form.format(arm[key])) for arm in (off, on))
    return left, right


def _named(side: dict[str, Any], name: str) -> str:
    if not side or side[name] is None:
        return "–"
    maximum = " (max)" if name == "p99" and side["p99_is"] == "maximum" else ""
    return _ms(side[name]) + maximum


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


def _tokens(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,} tokens"
