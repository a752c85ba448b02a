"""The page's tables. Each number says its unit and its kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

Document = dict[str, Any]

_LATENCIES = (
    ("ttft_ms", "TTFT from send"),
    ("schedule_ttft_ms", "TTFT from planned time"),
    ("send_lag_ms", "send lag"),
    ("itl_ms", "gap between tokens"),
    ("e2e_ms", "whole answer"),
)


def numbers(result: Document) -> str:
    rows: list[Sequence[str]] = []
    if unloaded := result["unloaded"]:
        rows.append(_latency("unloaded", "cold", "TTFT from send", unloaded["ttft_cold_ms"]))
        rows.append(_latency("unloaded", "warm", "TTFT from send", unloaded["ttft_warm_ms"]))
    arms = [(arm, result["loaded"][arm]) for arm in ("off", "on")] if result["loaded"] else []
    for key, name in _LATENCIES:
        rows += [_latency("loaded", f"cache {arm}", name, values[key]) for arm, values in arms if values]
    head = ("phase", "arm", "measured, in ms", "n", "p50", "p90", "p99", "max")
    counts = [_counts(arm, values) for arm, values in arms if values]
    counted = _table(
        ("arm", "requests", "results", "success", "requests/s", "output tokens/s", "cached tokens"), counts
    )
    return _table(head, rows, first_number=3) + ("<p></p>" + counted if counts else "")


def gates(result: Document) -> str:
    marks = {"pass": "passed", "fail": "FAILED", "not_applicable": "–"}
    rows = "".join(
        f"<tr><td class='{gate['status']}'>{marks[gate['status']]}</td><td>{escape(gate['name'].replace('_', ' '))}</td>"
        f"<td>{escape(gate['detail'])}</td></tr>"
        for gate in result["gates"]
    )
    return f"<div class='scroll'><table>{rows}</table></div>"


def setting(result: Document) -> str:
    engine, machine, commit, work = (result[key] for key in ("engine", "hardware", "commit", "workload"))
    ram = machine["ram_bytes"]
    dirty = {True: " with local changes", False: "", None: ""}[commit["dirty"]]
    rows = [
        ("engine (reported by it)", f"vLLM {_known(engine['version'])}, model {engine['model']}"),
        ("KV cache (reported)", f"{_tokens(engine['kv_tokens'])}, blocks of {_tokens(engine['block_size'])}"),
        ("client machine", f"{_known(machine['cpu_model'])}, {_known(machine['cores'])} cores"),
        ("memory", "unknown" if ram is None else f"{ram / 2**30:.1f} GiB"),
        ("commit of kvgate", f"{_known(commit['hash'])}{dirty}"),
        ("started", result["started_at"]),
        ("load", ", ".join(f"{key} {value}" for key, value in work["load"].items())),
        ("seed and token ids", f"{work['seed']}, {work['vocab']}"),
        ("plan, sha256", work["plan_sha256"]),
    ]
    for phase, shape in work["phases"].items():
        rows.append(
            (f"{phase} workload", ", ".join(f"{value} {key.replace('_', ' ')}" for key, value in shape.items()))
        )
    return _table(("", ""), rows)


def _latency(phase: str, arm: str, name: str, values: Document) -> Sequence[str]:
    p99 = _ms(values["p99"]) + (" (is the max)" if values["p99_is"] == "maximum" else "")
    return phase, arm, name, f"{values['n']:,}", _ms(values["p50"]), _ms(values["p90"]), p99, _ms(values["max"])


def _counts(arm: str, values: Document) -> Sequence[str]:
    results = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in values["results"].items() if count)
    cached = values["cached_tokens"]
    return (
        f"cache {arm}",
        f"{values['requests']:,}",
        results,
        f"{values['success_rate']:.1%}",
        _rate(values["requests_per_s"]),
        _rate(values["output_tokens_per_s"]),
        f"{_tokens(cached['delivered'])} reported of {_tokens(cached['ceiling'])} computed",
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], first_number: int | None = None) -> str:
    def cells(tag: str, row: Sequence[str]) -> Iterator[str]:
        for i, text in enumerate(row):
            css = " class='n'" if first_number is not None and i >= first_number else ""
            yield f"<{tag}{css}>{escape(text)}</{tag}>"

    top = f"<tr>{''.join(cells('th', head))}</tr>" if any(head) else ""
    body = "".join(f"<tr>{''.join(cells('td', row))}</tr>" for row in rows)
    return f"<div class='scroll'><table>{top}{body}</table></div>"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def _rate(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.2f} (measured)"


def _known(value: Any) -> str:
    return "unknown" if value is None else str(value)


def _tokens(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,} tokens"
