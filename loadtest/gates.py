"""Whether a run may be believed: each gate passes, fails with a reason, or does not apply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from loadtest.limits import Limits
from loadtest.outcome import Outcome
from loadtest.percentiles import summary
from loadtest.pressure import growing, offered_share
from loadtest.run import Block, Run
from loadtest.schedule import OpenLoop
from loadtest.truth import check_counters, reusable


class Status(StrEnum):
    PASS = "pass"  # noqa: S105 - a verdict, no password
    FAIL = "fail"
    NOT_APPLICABLE = "not_applicable"


@dataclass(frozen=True, slots=True)
class Gate:
    """`detail` is one sentence with the observed number and its limit; of a failed gate it is the reason."""

    name: str
    status: Status
    detail: str


def judge(run: Run, limits: Limits) -> tuple[Gate, ...]:
    outcomes = [o for block in run.blocks for o in block.outcomes]
    return (
        _errors(outcomes, limits),
        _token_exactness(outcomes),
        _canary_cold(run),
        _canary_warm(run),
        _cached_known(outcomes),
        _off_arm_cold(outcomes),
        _contamination(run),
        _counters(run.blocks),
        _send_lag(run, limits),
        _offered(run, limits),
        _stationary(run),
        _loop_lag(run.blocks, limits),
    )


def _gate(name: str, fault: str | None, fine: str) -> Gate:
    return Gate(name, Status.FAIL if fault else Status.PASS, fault or fine)


def _errors(outcomes: Sequence[Outcome], limits: Limits) -> Gate:
    failed = Counter(o.result.value for o in outcomes if not o.ok)
    rate = sum(failed.values()) / max(len(outcomes), 1)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(failed.items())) or "none failed"
    text = f"{kinds} of {len(outcomes)} requests ({rate:.1%}, limit {limits.error_rate:.1%})"
    example = next((f"; first: {o.detail}" for o in outcomes if not o.ok and o.detail), "")
    return _gate("errors", text + example if rate > limits.error_rate or not outcomes else None, text)


def _token_exactness(outcomes: Sequence[Outcome]) -> Gate:
    answered = [o for o in outcomes if o.ok]
    unknown = sum(o.prompt_tokens is None or o.completion_tokens is None for o in answered)
    prompts = [o for o in answered if o.prompt_tokens not in (None, o.request.prompt_tokens)]
    outputs = [o for o in answered if o.completion_tokens not in (None, o.request.output_tokens)]
    faults = []
    if unknown:
        faults.append(f"{unknown} answers carry no usage")
    for found, what in ((prompts, "prompt"), (outputs, "output")):
        if found:
            o = found[0]
            got, planned = (
                (o.prompt_tokens, o.request.prompt_tokens)
                if what == "prompt"
                else (o.completion_tokens, o.request.output_tokens)
            )
            faults.append(f"{len(found)} answers differ in {what} tokens, such as {got} for {planned} planned")
    return _gate("token_exactness", "; ".join(faults) or None, "prompt and output tokens are exactly as planned")


def _canary_cold(run: Run) -> Gate:
    first = [c for c in run.canaries if c.first]
    if not first:
        return Gate("canary_cold", Status.NOT_APPLICABLE, "no arm with prefix caching on")
    failed = [c for c in first if not c.outcome.ok]
    unknown = [c for c in first if c.outcome.ok and c.outcome.cached_tokens is None]
    warm = [c for c in first if c.outcome.cached_tokens]
    fault = None
    if failed:
        fault = f"{len(failed)} of {len(first)} canaries failed: {failed[0].outcome.detail}"
    elif unknown:
        fault = _UNKNOWN
    elif warm:
        fault = (
            f"the cache was warm: {len(warm)} of {len(first)} first uses of a prefix under a fresh salt found cached "
            f"tokens (up to {max(c.outcome.cached_tokens or 0 for c in warm)}); something on the way drops cache_salt"
        )
    return _gate("canary_cold", fault, f"each of {len(first)} first uses of a prefix found 0 cached tokens")


def _canary_warm(run: Run) -> Gate:
    """Of a prefix too short to fill a block nothing can hit, and nothing is asked."""
    size = run.facts.block_size
    second = [c for c in run.canaries if not c.first]
    asked = [c for c in second if size is None or reusable(10**9, c.outcome.request.prompt_tokens, size)]
    if not asked:
        return Gate("canary_warm", Status.NOT_APPLICABLE, "no arm with a prefix that could hit")
    missed = [c for c in asked if not c.outcome.cached_tokens]
    fault = (
        f"{len(missed)} of {len(asked)} second uses of a prefix found nothing: is prefix caching on, and does the "
        "route lead to the same replica?"
        if missed
        else None
    )
    return _gate("canary_warm", fault, f"each of {len(asked)} second uses of a prefix hit")


_UNKNOWN = "cached tokens are unknown: start the engine with --enable-prompt-tokens-details"


def _cached_known(outcomes: Sequence[Outcome]) -> Gate:
    unknown = sum(o.ok and o.cached_tokens is None for o in outcomes)
    fault = f"{_UNKNOWN} ({unknown} answers do not say)" if unknown else None
    return _gate("cached_tokens_known", fault, "each answer reports its cached tokens")


def _off_arm_cold(outcomes: Sequence[Outcome]) -> Gate:
    off = [o for o in outcomes if o.arm == "off"]
    if not off:
        return Gate("off_arm_cold", Status.NOT_APPLICABLE, "no arm with prefix caching off")
    hit = [o for o in off if o.cached_tokens]
    fault = (
        f"{len(hit)} of {len(off)} requests with a salt of their own found cached tokens "
        f"({sum(o.cached_tokens or 0 for o in hit)} in all): the off arm is contaminated"
        if hit
        else None
    )
    return _gate("off_arm_cold", fault, f"none of {len(off)} off-arm requests found cached tokens")


def _contamination(run: Run) -> Gate:
    size = run.facts.block_size
    if size is None:
        return Gate("contamination", Status.NOT_APPLICABLE, "the engine's block size is unknown")
    over = [
        o
        for block in run.blocks
        for o in block.outcomes
        if o.arm == "on" and (o.cached_tokens or 0) > reusable(o.request.shared_tokens, o.request.prompt_tokens, size)
    ]
    fault = f"{len(over)} requests found more cached tokens than the plan lets them share" if over else None
    return _gate("contamination", fault, "no request found more cached tokens than planned")


def _counters(blocks: Sequence[Block]) -> Gate:
    """One of the two cache counters is enough (older engines lack the other); the ones there are must agree."""
    checks = [check for block in blocks for check in check_counters(block)]
    wrong = [c for c in checks if c.agrees is False]
    if wrong:
        c = wrong[0]
        return Gate(
            "truth",
            Status.FAIL,
            f"{c.counter} grew by {c.grew} where the answers add up to {c.answers} tokens ({len(wrong)} of {len(checks)} "
            "checks): the engine serves someone else as well, or an answer is wrong",
        )
    for block in blocks:
        cache = [c.agrees for c in check_counters(block) if c.counter != "vllm:prompt_tokens_total"]
        if True not in cache:
            return Gate(
                "truth",
                Status.FAIL,
                "cached tokens could not be checked against the engine's counters: give --engine-metrics URL",
            )
    return Gate("truth", Status.PASS, f"the engine's counters agree with the answers in {len(blocks)} windows, exactly")


def _send_lag(run: Run, limits: Limits) -> Gate:
    lags = summary([o.send_lag_ms for block in run.blocks for o in block.outcomes])
    if not lags["n"]:
        return Gate("send_lag", Status.NOT_APPLICABLE, "nothing was sent")
    kind = "p99" if lags["p99_is"] == "percentile" else f"maximum of {lags['n']}"
    text = f"requests left {lags['p99']:.1f} ms late ({kind}, limit {limits.send_lag_ms:g} ms)"
    return _gate("send_lag", text if lags["p99"] > limits.send_lag_ms else None, text)


def _offered(run: Run, limits: Limits) -> Gate:
    shares = [offered_share(block.outcomes) for block in _open_blocks(run)]
    if not shares:
        return Gate("offered_load", Status.NOT_APPLICABLE, "a closed loop offers what the engine takes")
    text = f"{min(shares):.1%} of the planned rate was sent in the worst window (limit {limits.offered:.0%})"
    return _gate("offered_load", text if min(shares) < limits.offered else None, text)


def _stationary(run: Run) -> Gate:
    blocks = _open_blocks(run)
    if not blocks:
        return Gate("stationarity", Status.NOT_APPLICABLE, "a closed loop has no queue of its own")
    grows = sorted({f"{block.arm}" for block in blocks if growing(block.outcomes)})
    fault = (
        f"requests in flight grew until the end with prefix caching {' and '.join(grows)}: past its capacity a latency "
        "says only how long the run was; lower --rate"
        if grows
        else None
    )
    return _gate("stationarity", fault, "requests in flight did not grow over the windows")


def _loop_lag(blocks: Sequence[Block], limits: Limits) -> Gate:
    lags = summary([ms for block in blocks for ms in block.loop_lag_ms])
    if not lags["n"]:
        return Gate("client_loop_lag", Status.NOT_APPLICABLE, "the windows were too short to sample the client")
    kind = "p99" if lags["p99_is"] == "percentile" else f"maximum of {lags['n']}"
    text = f"the client's event loop ran {lags['p99']:.1f} ms late ({kind}, limit {limits.loop_lag_ms:g} ms)"
    return _gate("client_loop_lag", text if lags["p99"] > limits.loop_lag_ms else None, text)


def _open_blocks(run: Run) -> list[Block]:
    return [b for b in run.blocks if b.phase == "loaded" and isinstance(run.plan.load, OpenLoop)]
