"""The policy `cost`: what it weighs, and which way each part of it pulls."""

import pytest

from kvcache.match import Match
from server.replica import Replica
from server.routing.asked import Asked
from server.routing.cost import AFTER, MEMORY, PRESSURE, RATE, RUNNING, SHARE, CostPolicy
from server.routing.work import Work
from tests.server.clock import Clock
from tests.server.routing.fleet import replica

LONG = 64.0  # s, later than any test's clock


def asked(tokens: int = 1000, held: dict[Replica, int] | None = None, prompt: bytes | None = b"p" * 4000) -> Asked:
    tokens_of = {r.name: n for r, n in (held or {}).items()}
    return Asked(tokens, 0, prompt=prompt, match=Match(tokens_of, max(tokens_of.values(), default=0)))


def policy() -> CostPolicy:
    return CostPolicy(Clock(0.0))


def test_a_cost_is_the_seconds_to_the_first_token() -> None:
    one = replica(1, rate=500.0, inflight=3, kv_utilization=0.5)
    one.work.begin(250, 0, LONG)
    (cost,) = policy().costs([one], asked(1000, {one: 400}))
    assert (cost.held, cost.miss, cost.queued, cost.rate) == (400, 600, 250, 500.0)
    assert cost.pressure == pytest.approx(PRESSURE)
    assert cost.seconds == pytest.approx((250 + (1 + AFTER) * 600) / 500.0 + PRESSURE + 3 * RUNNING)


def test_the_prompt_goes_where_it_is_held() -> None:
    fleet = [replica(n) for n in range(1, 5)]
    assert {policy().choose(fleet, asked(1000, {fleet[2]: 900})).name for _ in range(4)} == {fleet[2].name}


def test_a_hot_prefix_spreads_once_waiting_costs_more_than_computing_it() -> None:
    hot, cold = replica(1), replica(2)
    choose = policy().choose
    hot.work.begin(900, 0, LONG)
    assert choose([hot, cold], asked(1000, {hot: 900})) is hot  # as long as computing it, and nobody else has to wait
    hot.work.begin(round(AFTER * 900) + 1, 0, LONG)
    assert choose([hot, cold], asked(1000, {hot: 900})) is cold


def test_the_faster_engine_is_worth_a_detour() -> None:
    slow, fast = replica(1, rate=100.0), replica(2, rate=2000.0)
    assert policy().choose([slow, fast], asked(1000, {slow: 800})) is fast


def test_an_engine_that_was_not_measured_is_taken_for_one_like_the_others() -> None:
    fleet = [replica(1, rate=None), replica(2, rate=100.0), replica(3, rate=300.0), replica(4, rate=800.0)]
    assert [cost.rate for cost in policy().costs(fleet, asked())] == [300.0, 100.0, 300.0, 800.0]
    assert [cost.rate for cost in policy().costs(fleet[:1], asked())] == [RATE]


def test_what_is_held_counts_by_the_faith_in_it() -> None:
    honest, doubtful = replica(1), replica(2, faith=0.5)
    costs = policy().costs([honest, doubtful], asked(1000, {honest: 600, doubtful: 800}))
    assert [cost.miss for cost in costs] == [400, 600]
    assert policy().choose([honest, doubtful], asked(1000, {honest: 600, doubtful: 800})) is honest


def test_a_nearly_full_engine_is_avoided_though_it_holds_more() -> None:
    full, free = replica(1, kv_utilization=0.97), replica(2, kv_utilization=0.2)
    assert policy().choose([full, free], asked(1000, {full: 900, free: 0})) is free
    full.kv_utilization = 0.4
    assert policy().choose([full, free], asked(1000, {full: 900, free: 0})) is full


def test_memory_that_was_promised_since_the_last_scrape_counts() -> None:
    promised, free = replica(1, kv_tokens=10_000, kv_utilization=0.0), replica(2, kv_tokens=10_000, kv_utilization=0.0)
    promised.work.begin(0, 9_000, LONG)
    first, second = policy().costs([promised, free], asked(500))
    assert first.pressure == pytest.approx(PRESSURE * 0.95 / 0.05)
    assert second.pressure == pytest.approx(PRESSURE * 0.05 / 0.95)


def test_new_prompts_take_turns() -> None:
    fleet = [replica(n) for n in range(1, 5)]
    choose = policy().choose
    names = [choose(fleet, asked(prompt=b"%d" % n * 300)).name for n in range(40)]
    assert {names.count(r.name) for r in fleet} == {10}


def test_what_should_be_computed_by_now_is_not_waited_for() -> None:
    clock = Clock(10.0)
    one = replica(1, rate=100.0, work=Work(clock))
    first = one.work.begin(500, 0, LONG)
    one.work.begin(300, 0, LONG)

    def queued() -> float:
        return CostPolicy(clock).costs([one], asked())[0].queued

    assert queued() == 800
    clock.now = 12.0
    assert queued() == 600
    clock.now = 40.0
    assert queued() == 300  # of the second nothing is done before the first is
    one.work.computed(first)
    clock.now = 41.0
    assert queued() == 200


def test_what_was_computed_lately_makes_a_miss_dearer() -> None:
    fleet = [replica(n) for n in range(1, 5)]
    choose = policy().choose
    first = choose(fleet, asked())
    costs = {r.name: cost for r, cost in zip(fleet, policy().costs(fleet, asked()), strict=True)}
    assert costs.pop(first.name).weight == 1 + AFTER * SHARE[1]
    assert [cost.weight for cost in costs.values()] == [1 + AFTER * SHARE[0]] * 3
    assert costs.popitem()[1].seconds == pytest.approx((1 + AFTER * SHARE[0]) * 1.0)


def test_long_new_prompts_are_spread_by_what_they_cost_and_not_by_number() -> None:
    fleet = [replica(n) for n in range(1, 3)]
    choose = policy().choose
    given = dict.fromkeys(fleet, 0)
    for n in range(60):
        tokens = 8000 if n % 2 else 500  # taking turns would send all long ones to the same
        given[choose(fleet, asked(tokens))] += tokens
    assert max(given.values()) <= 1.2 * min(given.values())


def test_what_was_computed_long_ago_counts_no_more() -> None:
    old, new = replica(1), replica(2)
    old.work.lately, new.work.lately = 1000.0, 1.0
    one = policy()
    for _ in range(200):
        one.choose([old, new], asked(MEMORY))
    assert old.work.lately < 1500
    assert 0.8 < old.work.lately / new.work.lately < 1.25


def test_a_prompt_never_hits_its_last_token() -> None:
    one = replica(1)
    (cost,) = policy().costs([one], asked(1000, {one: 1000}))
    assert (cost.held, cost.miss) == (999, 1)


def test_work_that_is_due_is_not_waited_for() -> None:
    clock = Clock(0.0)
    one = replica(1)
    one.work.begin(500, 0, due=3.0)
    assert CostPolicy(clock).costs([one], asked())[0].queued == 500
    clock.now = 3.0
    assert CostPolicy(clock).costs([one], asked())[0].queued == 0
