"""The result as a JSON document and as a Markdown page. Both are made from the same values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bench import faults
from bench.phases import Effort
from bench.rounds import Outcome
from bench.stats import Judgement, Spread
from bench.suites import Suite

SCHEMA = 2


def document(
    suite: Suite, outcome: Outcome, judged: list[Judgement], effort: Effort, environment: dict[str, Any]
) -> dict[str, Any]:
    phases: dict[str, Any] = {}
    for phase, series in outcome.series.items():
        phases[phase] = {}
        for target, one in series.items():
            figures = dict.fromkeys(name for sample in one.samples for name in sample.figures)
            summary = {name: spread.json() for name in figures if (spread := one.spread(name))}
            for percent in ("p50", "p99"):
                if added := outcome.added_ttft(phase, target, f"ttft_{percent}_ms"):
                    summary[f"added_ttft_{percent}_ms"] = added.json()
            rounds = [_rounded(sample.figures) for sample in one.samples]
            phases[phase][target] = {"summary": summary, "rounds": rounds, "faults": one.faults}
    return {
        "schema": SCHEMA,
        "suite": suite.name,
        "backends": suite.backends,
        "environment": environment,
        "effort": {"rounds": effort.rounds, "seconds": effort.seconds, "streams_per_connection": effort.repeat},
        "verdict": verdict(judged, faults.shortfalls(outcome.findings, suite.faulted)),
        "bars": [
            {
                "name": j.bar.name,
                "phase": j.bar.phase,
                "target": j.bar.target,
                "base": j.bar.base,
                "figure": j.bar.figure,
                "limit": j.bar.limit,
                "tie": j.bar.tie,
                "ratio": j.ratio.json() if j.ratio else None,
                "difference": j.difference.json() if j.difference else None,
                "verdict": j.verdict,
                "reasons": list(j.reasons),
            }
            for j in judged
        ],
        "phases": phases,
        "did_not_start": outcome.absent,
        "faults": {
            name: {check: {"seen": finding.text, "ok": finding.ok} for check, finding in found.items()}
            for name, found in outcome.findings.items()
        },
    }


def verdict(judged: Iterable[Judgement], shortfalls: Iterable[str] = ()) -> str:
    """INVALID outweighs fail: an invalid bar says nothing, so the whole says nothing. A shortfall is a failed bar; "none"
    is where no bar was run."""
    verdicts = {j.verdict for j in judged} | {"fail" for _ in shortfalls}
    return next((v for v in ("INVALID", "fail", "pass") if v in verdicts), "none")


def _rounded(figures: dict[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else round(value, 4) for name, value in figures.items()}


def markdown(
    suite: Suite, outcome: Outcome, judged: list[Judgement], effort: Effort, environment: dict[str, Any]
) -> str:
    commit = f"`{(environment['commit'] or 'unknown')[:12]}`" + (
        " with uncommitted changes" if environment["dirty"] else ""
    )
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    lines = [
        f"# {suite.title}",
        "",
        f"Measured by `python -m bench {suite.name}` on {environment['date']}, commit {commit}, {environment['cpu']}, "
        f"{environment['cores']} cores, {environment['kernel']}, load average at the start "
        f"{environment['load_average_at_start']}. Versions: {versions}.",
        "",
        f"{'One upstream answers' if suite.backends == 1 else f'{suite.backends} upstreams answer'} at once, and with the "
        "load share one core; the target's whole process tree has another. "
        f"{effort.rounds} round{'s' if effort.rounds > 1 else ''}, the targets in turn in each; every figure is measured: "
        "median (lowest–highest) over the rounds.",
        "",
        "| bar | phase | of | measured × | at most | difference | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_bar(judgement) for judgement in judged]
    for phase, series in outcome.series.items():
        columns = STREAM_COLUMNS if any(s.spread("ttft_p50_ms") for s in series.values()) else REQUEST_COLUMNS
        lines += ["", f"## {phase}", "", f"| target | {' | '.join(columns.values())} | failures |"]
        lines.append("|---" * (len(columns) + 2) + "|")
        for target, one in series.items():
            cells = []
            for figure in columns:
                added = figure.startswith("added_")
                spread = outcome.added_ttft(phase, target, figure[6:]) if added else one.spread(figure)
                cells.append(_cell(spread, 0 if figure in WHOLE else 2))
            failures = "; ".join(one.faults) or "0"
            lines.append(f"| {target} | {' | '.join(cells)} | {failures} |")
        for target, reason in outcome.absent.get(phase, {}).items():
            lines += ["", f"**{target}** did not start: {' '.join(reason.split())}"]
    if outcome.findings:
        lines += ["", "## Failing engines", "", *faults.table(outcome.findings), "", FAULT_NOTES]
    notes = [
        "",
        "CPU µs is user and system time of the target's process tree from /proc, divided by requests or chunks. "
        "Requests per second of a fast target are limited by the load side and are floors. "
        "TTFT runs from the write of the request to the first event; *added* is over direct, at the same percentile. "
        "*others* is what else ran on the gateway's core, the kernel's own work included. "
        "*retaken* is how often a round was measured again because streams did not keep their pace.",
        "",
    ]
    if suite.notes:
        notes += [suite.notes, ""]
    return "\n".join(lines + notes)


def _bar(judged: Judgement) -> str:
    bar = judged.bar
    reasons = f": {'; '.join(judged.reasons)}" if judged.reasons else ""
    difference = f"{_cell(judged.difference, 2)} {bar.unit}" if judged.difference else "-"
    cells = (
        bar.name,
        bar.phase,
        bar.base,
        _cell(judged.ratio, 2),
        f"{bar.limit:g}",
        difference,
        f"{judged.verdict}{reasons}",
    )
    return f"| {' | '.join(cells)} |"


FAULT_NOTES = (
    "Bold is what a gateway must not do: refuse innocent requests because others failed, lose requests to a dead engine, "
    "leave one that is back unused for more than 5 s, let a cut stream look complete ([DONE], or the end of the message "
    "without an error event)."
)
REQUEST_COLUMNS = {
    "cpu_us": "CPU µs/request",
    "per_s": "requests/s",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "rss_mb": "RSS MB",
    "others_cpu_share": "others, cores",
    "count": "requests a round",
    "upstream_requests": "upstream requests each",
    "smaller_share": "smaller share",
}
STREAM_COLUMNS = {
    "cpu_us": "CPU µs/chunk",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "TTFT p99 ms",
    "added_ttft_p50_ms": "added p50 ms",
    "added_ttft_p99_ms": "added p99 ms",
    "rss_mb": "RSS MB",
    "others_cpu_share": "others, cores",
    "chunks": "chunks a round",
    "retaken": "retaken",
}
WHOLE = ("per_s", "count", "chunks", "rss_mb", "retaken")


def _cell(spread: Spread | None, digits: int) -> str:
    if spread is None:
        return "-"
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f}–{spread.high:.{digits}f})"
