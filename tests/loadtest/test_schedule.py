from __future__ import annotations

import asyncio
import itertools
from statistics import fmean, pstdev

import pytest

from loadtest.client import Shot
from loadtest.driver import closed_loop, open_loop
from loadtest.outcome import Outcome, ResultClass
from loadtest.plan import Plan, Shape, make_plan
from loadtest.pressure import growing, offered_share
from loadtest.schedule import ClosedLoop, OpenLoop, offsets_ns


def gaps(offsets: tuple[int, ...]) -> list[int]:
    return [b - a for a, b in itertools.pairwise(offsets)]


def test_poisson_gaps_have_a_variation_of_one_and_the_asked_mean() -> None:
    found = gaps(offsets_ns(OpenLoop("poisson", 20.0), 20_000, seed=4))
    assert fmean(found) == pytest.approx(5e7, rel=0.03)
    assert pstdev(found) / fmean(found) == pytest.approx(1.0, abs=0.03)


def test_constant_gaps_are_exactly_constant_and_do_not_drift() -> None:
    assert set(gaps(offsets_ns(OpenLoop("constant", 8.0), 1000, seed=4))) == {125_000_000}
    thirds = offsets_ns(OpenLoop("constant", 3.0), 3001, seed=4)
    assert thirds[3000] == 1_000_000_000_000


def test_arrivals_follow_the_seed() -> None:
    load = OpenLoop("poisson", 20.0)
    assert offsets_ns(load, 50, 1) == offsets_ns(load, 50, 1) != offsets_ns(load, 50, 2)


class FakeClock:
    """Time moves only when someone sleeps or is made to take time."""

    def __init__(self) -> None:
        self.now = 0

    def now_ns(self) -> int:
        return self.now

    async def sleep_until(self, due_ns: int) -> None:
        await asyncio.sleep(0)
        self.now = max(self.now, due_ns)


class SlowSender:
    """Blocks the whole client for `takes_ns` at each send, as a starved process does."""

    def __init__(self, clock: FakeClock, takes_ns: int) -> None:
        self.clock, self.takes_ns = clock, takes_ns

    async def send(self, shot: Shot, planned_ns: int) -> Outcome:
        sent = self.clock.now
        self.clock.now += self.takes_ns
        return Outcome(
            shot.request, shot.arm, shot.block, ResultClass.OK, planned_ns, sent, self.clock.now, self.clock.now
        )


def shots(plan: Plan) -> list[Shot]:
    return [Shot(r, "on", 0, b"") for r in plan.requests]


def plan_of(load: OpenLoop | ClosedLoop, turns: int = 1) -> Plan:
    return make_plan(seed=1, load=load, unloaded=None, loaded=Shape(1, 10, turns, 8, 4, 2))


async def test_a_late_client_is_late_and_says_so() -> None:
    """The due times neither move nor get lost: lag grows, and offered load falls, in the records."""
    clock, done = FakeClock(), list[Outcome]()
    plan = plan_of(OpenLoop("constant", 10.0))
    outcomes = await open_loop(shots(plan), SlowSender(clock, 150_000_000), done.append, clock)
    assert len(outcomes) == len(done) == 10
    start = outcomes[0].planned_ns
    assert [o.planned_ns - start for o in outcomes] == [i * 100_000_000 for i in range(10)]
    assert max(o.send_lag_ms for o in outcomes) > 300
    last = max(outcomes, key=lambda o: o.send_lag_ms)
    assert last.schedule_ttft_ms is not None
    assert last.service_ttft_ms is not None
    assert last.schedule_ttft_ms == pytest.approx(last.service_ttft_ms + last.send_lag_ms)
    assert offered_share(outcomes) < 0.8


async def test_a_prompt_client_is_on_time() -> None:
    clock = FakeClock()
    outcomes = await open_loop(shots(plan_of(OpenLoop("constant", 10.0))), SlowSender(clock, 0), lambda _: None, clock)
    assert [o.send_lag_ms for o in outcomes] == [0.0] * 10
    assert offered_share(outcomes) == 1.0


async def test_a_closed_loop_sends_each_once_and_turns_in_order() -> None:
    clock, plan = FakeClock(), plan_of(ClosedLoop(4), turns=3)
    outcomes = await closed_loop(shots(plan), 4, SlowSender(clock, 1000), lambda _: None, clock)
    assert sorted(o.request.index for o in outcomes) == list(range(30))
    ended = {(o.request.session, o.request.turn): o.end_ns for o in outcomes}
    for o in outcomes:
        if o.request.turn:
            assert o.planned_ns >= ended[o.request.session, o.request.turn - 1]


def flight(arrivals: list[float], takes: list[float]) -> list[Outcome]:
    request = plan_of(ClosedLoop(1)).requests[0]
    return [
        Outcome(request, "on", 0, ResultClass.OK, int(a), int(a), int(a + t), int(a + t))
        for a, t in zip(arrivals, takes, strict=True)
    ]


def test_a_growing_queue_is_told_from_a_steady_one() -> None:
    arrivals = [float(i * 100) for i in range(90)]
    assert not growing(flight(arrivals, [450.0] * 90))
    assert growing(flight(arrivals, [100.0 + 60 * i for i in range(90)]))
