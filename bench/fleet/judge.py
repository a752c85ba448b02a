"""What has to hold, and whether what was measured can be stood behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.fleet.arms import COST, PEERS, ROUND_ROBIN, Arm

DELIVERED = 0.97  # of the ideal, at the lowest rate
USED = 0.70  # of a replica's time for prompts, at most, at the lowest rate
LAG_MS = 20.0  # 99th percentile of what requests are sent late; above, the load side fell behind
LATE = 0.05  # of its time by which the fleet's steps may take longer than they should; above, the machine is too slow


@dataclass(slots=True)
class Rate:
    """The replay at one speed. load: the share of their time for which the engines compute prompts if every policy hit what the
    ideal hits. speed: times the trace's own. absent: why a policy did not start."""

    load: float
    speed: float
    seconds: float
    arms: dict[str, Arm] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ideal:
    """In tokens of the replay: all prompts; what one cache of the whole fleet's size delivers; what an endless one does."""

    prompts: int
    pooled: int
    endless: int


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    measured: float | None
    limit: float
    verdict: str
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = "unknown" if self.measured is None else f"{self.measured:.3f}"
        return (
            f"{self.verdict}: {self.name}: {shown}, limit {self.limit:g}{''.join(f' ({why})' for why in self.reasons)}"
        )


def faults(arm: Arm, tokens: Sequence[int]) -> list[str]:
    """Why an arm's numbers cannot be stood behind. tokens: of each prompt, as planned."""
    found = []
    if (lag := arm.lag_ms(99)) > LAG_MS:
        found.append(f"requests were sent {lag:.0f} ms late at the 99th percentile")
    if arm.late > LATE:
        found.append(f"the engines ran {arm.late:.0%} behind their time")
    wrong = sum(a["prompt"] not in (None, n) for a, n in zip(arm.answers, tokens, strict=True))
    if wrong:
        found.append(f"{wrong} prompts have another number of tokens than planned")
    unknown = sum(a["end_s"] is not None and a["cached"] is None for a in arm.answers)
    if unknown:
        found.append(f"{unknown} answers do not tell what was cached")
    return found


def bars(rates: Sequence[Rate], ideal: Ideal, prefill: float, tokens: Sequence[int]) -> list[Bar]:
    """rates: the lowest first. prefill: tokens a second of an engine. A bar is INVALID where either of its arms is."""
    judged = []
    low = rates[0]
    ours = low.arms.get(COST)
    why = _why(low, (COST,), tokens)
    share = ours.delivered / ideal.pooled if ours else None
    judged.append(_bar(f"{COST} delivered of the ideal, load {low.load:g}", share, DELIVERED, why, at_least=True))
    used = max(ours.used(prefill)) if ours else None
    judged.append(_bar(f"{COST} busiest replica, load {low.load:g}", used, USED, why))
    for rate in rates:
        for other in (ROUND_ROBIN, *PEERS):
            if other not in rate.arms and other not in rate.absent:
                continue
            why = _why(rate, (COST, other), tokens)
            both = COST in rate.arms and other in rate.arms
            ratio = rate.arms[COST].ttft_ms(90) / rate.arms[other].ttft_ms(90) if both else None
            judged.append(_bar(f"{COST} TTFT p90 over that of {other}, load {rate.load:g}", ratio, 1.0, why))
    return judged


def _why(rate: Rate, policies: Sequence[str], tokens: Sequence[int]) -> list[str]:
    missing = [f"{policy} did not run" for policy in policies if policy not in rate.arms]
    return missing + [
        f"{name}: {fault}" for name in policies if name in rate.arms for fault in faults(rate.arms[name], tokens)
    ]


def _bar(name: str, measured: float | None, limit: float, why: Sequence[str], *, at_least: bool = False) -> Bar:
    if why or measured is None:
        return Bar(name, measured, limit, "INVALID", tuple(why))
    met = measured >= limit if at_least else measured <= limit
    return Bar(name, measured, limit, "pass" if met else "fail")


def verdict(judged: Sequence[Bar]) -> str:
    """INVALID outweighs fail."""
    verdicts = {bar.verdict for bar in judged}
    return next((one for one in ("INVALID", "fail", "pass") if one in verdicts), "none")


def figures(arm: Arm, ideal: Ideal, prefill: float) -> Mapping[str, float]:
    """The table's row. Times in ms."""
    computed, requests = arm.computed(), [did["requests"] for did in arm.did]
    return {
        "delivered_of_ideal": arm.delivered / ideal.pooled,
        "hit_share": arm.delivered / ideal.prompts,
        "ttft_p50_ms": arm.ttft_ms(50),
        "ttft_p90_ms": arm.ttft_ms(90),
        "ttft_p99_ms": arm.ttft_ms(99),
        "succeeded": arm.succeeded,
        "busiest_used": max(arm.used(prefill)),
        "computed_tokens_max_over_mean": max(computed) * len(computed) / max(1.0, sum(computed)),
        "requests_max_over_mean": max(requests) * len(requests) / max(1.0, sum(requests)),
        "preemptions": sum(did["preemptions"] for did in arm.did),
        "send_lag_p99_ms": arm.lag_ms(99),
        "engines_late_share": arm.late,
    }
