"""pytest tests/server/tenants/test_limits.py: limits in this process, on a clock of the test's."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.errors import Problem
from server.tenants.budget import Limits
from server.tenants.limits import SWEEP_FROM, MemoryLease, MemoryLimits


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """Limits of one kind for all tenants, and their clock."""

    def __init__(self, **limits: float) -> None:
        self.clock = Clock()
        self.limits = Limits(**limits)  # type: ignore[arg-type]
        self.granter = MemoryLimits(lambda tenant: self.limits, self.clock)

    def granted(self, tokens: int = 0, tenant: str = "acme") -> MemoryLease:
        lease = self.granter.acquire(tenant, tokens)
        assert isinstance(lease, MemoryLease), lease
        return lease

    def refused(self, tokens: int = 0, tenant: str = "acme") -> Problem:
        problem = self.granter.acquire(tenant, tokens)
        assert isinstance(problem, Problem)
        assert (problem.status, problem.code) == (429, "rate_limit_exceeded")
        return problem


def test_requests() -> None:
    bench = Bench(requests_per_minute=6)
    for _ in range(6):
        bench.granted().release()
    problem = bench.refused()
    assert (problem.reason, problem.retry_after) == ("requests", 10)
    assert problem.message == "Tenant acme is at its limit of 6 requests per minute. Try again in 10 s."
    bench.clock.now += 9.5
    assert bench.refused().retry_after == 1
    bench.clock.now += 0.5
    bench.granted()
    bench.refused()
    bench.granted(tenant="other")


def test_input_tokens_are_estimated_and_then_settled() -> None:
    bench = Bench(input_tokens_per_minute=600)
    lease = bench.granted(500)
    problem = bench.refused(200)
    assert (problem.reason, problem.retry_after) == ("input_tokens", 10)
    lease.settle(prompt=400, cached=None, output=9)
    lease.settle(prompt=0, cached=0, output=0)  # counts once
    lease.release()
    bench.refused(201)
    bench.granted(200)


def test_an_estimate_that_was_too_low_leaves_a_debt() -> None:
    bench = Bench(input_tokens_per_minute=600)
    bench.granted(600).settle(1200, 0, 0)
    assert bench.refused(60).retry_after == 66
    bench.clock.now += 66
    bench.granted(60)


@pytest.mark.parametrize(
    ("prompt", "cached", "left"),
    [(400, 300, 600 - 100 - 30), (400, None, 200), (400, 9999, 560), (400, -1, 200), (None, None, 100), (0, 0, 600)],
)
def test_cached_tokens_weigh_less(prompt: int | None, cached: int | None, left: int) -> None:
    bench = Bench(input_tokens_per_minute=600, cached_weight=0.1)
    bench.granted(500).settle(prompt, cached, None)
    bench.refused(left + 1)
    bench.granted(left)


def test_a_refund_never_makes_more_than_a_bucket() -> None:
    bench = Bench(input_tokens_per_minute=600)
    lease = bench.granted(500)
    bench.clock.now += 60
    lease.settle(0, 0, 0)
    assert bench.refused(601).retry_after is None
    bench.granted(600)
    assert bench.refused(10).retry_after == 1


def test_output_tokens_are_charged_afterwards() -> None:
    bench = Bench(output_tokens_per_minute=60)
    lease = bench.granted()
    lease.settle(10, 0, 90)
    lease.release()
    problem = bench.refused()
    assert (problem.reason, problem.retry_after) == ("output_tokens", 31)  # back to one token
    bench.clock.now += 31
    lease = bench.granted()
    lease.settle(10, None, None)
    bench.granted().settle(10, 0, -5)


def test_an_idle_minute_does_not_pay_for_a_charge() -> None:
    bench = Bench(output_tokens_per_minute=60)
    lease = bench.granted()
    bench.clock.now += 60
    lease.settle(None, None, 60)
    assert bench.refused().reason == "output_tokens"


def test_concurrency() -> None:
    bench = Bench(concurrency=2)
    first, _ = bench.granted(), bench.granted()
    problem = bench.refused()
    assert (problem.reason, problem.retry_after) == ("concurrency", 1)
    first.release()
    first.release()
    bench.granted()
    bench.refused()
    assert bench.granter.running("acme") == 2


def test_a_refused_request_costs_nothing() -> None:
    bench = Bench(requests_per_minute=2, input_tokens_per_minute=100)
    bench.granted(100)
    for _ in range(10):
        bench.refused(50)
    bench.clock.now += 30
    bench.granted(50)


def test_the_last_limit_to_pass_is_named() -> None:
    bench = Bench(requests_per_minute=60, input_tokens_per_minute=60, concurrency=1)
    bench.granted(60)
    assert (bench.refused(30).reason, bench.refused(30).retry_after) == ("input_tokens", 30)


def test_a_request_that_can_never_pass_is_told_so() -> None:
    problem = Bench(input_tokens_per_minute=100).refused(101)
    assert (problem.reason, problem.retry_after) == ("input_tokens", None)
    assert "more than tenant acme may send in a minute (100)" in problem.message


def test_without_limits_everything_passes() -> None:
    bench = Bench()
    for _ in range(1000):
        bench.granted(10**9).settle(10**9, 0, 10**9)


def test_a_lease_that_is_closed_settles_nothing() -> None:
    bench = Bench(output_tokens_per_minute=60)
    lease = bench.granted()
    lease.release()
    lease.settle(0, 0, 1000)
    bench.granted()


def test_other_limits_keep_what_was_used() -> None:
    bench = Bench(requests_per_minute=10, concurrency=1)
    lease = bench.granted()
    bench.limits = replace(bench.limits, requests_per_minute=100, concurrency=2)
    bench.granter.reload()
    bench.granted()
    assert bench.refused().reason == "concurrency"
    lease.release()
    bench.limits = Limits(requests_per_minute=2)
    bench.granter.reload()
    bench.granted(), bench.granted()
    assert bench.refused().reason == "requests"
    bench.limits = Limits()
    bench.granter.reload()
    bench.granted()


def test_memory_is_bounded_by_those_who_use_something() -> None:
    bench = Bench(requests_per_minute=60)
    kept = bench.granted(tenant="runs")
    for number in range(20 * SWEEP_FROM):
        bench.granted(tenant=f"t{number}").release()
        bench.clock.now += 0.1
    assert len(bench.granter) <= 2 * SWEEP_FROM
    assert bench.granter.running("runs") == 1
    kept.release()


steps = st.tuples(
    st.floats(0, 40),  # seconds that pass
    st.integers(0, 120),  # estimate
    st.tuples(st.integers(0, 150), st.integers(0, 150), st.integers(0, 90)),  # the engine's counts
    st.booleans(),  # whether the oldest running request ends first
)


@given(st.lists(steps, max_size=60))
def test_no_window_holds_more_than_its_limit_and_one_bucket(script: list[tuple[float, int, object, bool]]) -> None:
    bench = Bench(requests_per_minute=20, input_tokens_per_minute=100, concurrency=3)
    used: list[tuple[float, int]] = []
    running: deque[MemoryLease] = deque()
    for seconds, tokens, _, ends in script:
        bench.clock.now += seconds
        if ends and running:
            running.popleft().release()
        lease = bench.granter.acquire("acme", tokens)
        if isinstance(lease, MemoryLease):
            used.append((bench.clock.now, tokens))
            running.append(lease)
        assert len(running) <= 3
    for first in range(len(used)):
        for last in range(first, len(used)):
            window = used[last][0] - used[first][0]
            inside = used[first : last + 1]
            assert len(inside) <= 20 + window * 20 / 60 + 0.01
            assert sum(tokens for _, tokens in inside) <= 100 + window * 100 / 60 + 0.01


@given(st.lists(steps, max_size=60), st.sampled_from([0.0, 0.25, 1.0]))
def test_what_is_settled_is_what_counts(
    script: list[tuple[float, int, tuple[int, int, int], bool]], cached_weight: float
) -> None:
    """Against a model: one number for each bucket."""
    limits = Limits(20, 100, 50, 3, cached_weight)
    bench = Bench()
    bench.limits = limits
    caps = (20.0, 100.0, 50.0)
    levels = list(caps)
    running: deque[tuple[MemoryLease, int, tuple[int, int, int]]] = deque()
    for seconds, tokens, counts, ends in script:
        bench.clock.now += seconds
        levels = [min(cap, level + seconds * cap / 60) for cap, level in zip(caps, levels, strict=True)]
        if ends and running:
            lease, estimate, (prompt, cached, output) = running.popleft()
            lease.settle(prompt, cached, output)
            lease.release()
            cached = min(cached, prompt)
            levels[1] = min(100.0, levels[1] + estimate - (prompt - cached) - cached * cached_weight)
            levels[2] -= output
        spare = (levels[0] - 1, levels[1] - tokens, levels[2] - 1)
        if any(abs(value) < 1e-3 for value in spare):
            return  # rounding decides
        answer = bench.granter.acquire("acme", tokens)
        assert isinstance(answer, MemoryLease) == (min(spare) > 0 and len(running) < 3)
        if isinstance(answer, MemoryLease):
            levels[0] -= 1
            levels[1] -= tokens
            running.append((answer, tokens, counts))
        assert bench.granter.running("acme") == len(running)


@given(st.lists(steps, max_size=40))
def test_whoever_waits_as_told_passes(script: list[tuple[float, int, tuple[int, int, int], bool]]) -> None:
    bench = Bench(requests_per_minute=7, input_tokens_per_minute=100, output_tokens_per_minute=30)
    for seconds, tokens, counts, _ in script:
        bench.clock.now += seconds
        answer = bench.granter.acquire("acme", tokens)
        if isinstance(answer, Problem) and answer.retry_after is not None:
            bench.clock.now += answer.retry_after
            answer = bench.granted(tokens)
        if isinstance(answer, MemoryLease):
            answer.settle(*counts)
            answer.release()
