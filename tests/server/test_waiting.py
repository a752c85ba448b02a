"""The admission queue: slots are never exceeded nor lost, everyone gets one outcome, and tenants get their shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvgate.errors import Problem
from server.waiting import PASSED_OVER, AdmissionQueue
from tests.server.clock import Clock

MAX_WAITING = 6
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 5.0}


@dataclass(eq=False)
class Request:
    tenant: str
    priority: int = 0
    number: int = 0
    weight: float = 1.0
    since: float = 0.0
    log: list[Request] = field(default_factory=list, repr=False)
    outcome: str = ""

    def admitted(self) -> None:
        self.end("running")
        self.log.append(self)

    def refused(self, problem: Problem) -> None:
        assert (problem.status, problem.code) == (503, "saturated")
        assert problem.retry_after is not None
        assert problem.retry_after >= 1
        self.end(str(problem.reason))

    def end(self, outcome: str) -> None:
        assert self.outcome in ("", "waiting"), f"{self} gets a second outcome, {outcome}"
        self.outcome = outcome


class QueueMachine(RuleBasedStateMachine):
    """Any order of arrivals, ends, departures, waits and changes of capacity."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.capacity = 2
        self.queue = AdmissionQueue(lambda: self.capacity, MAX_WAITING, 10.0, self.clock)
        self.every: list[Request] = []
        self.log: list[Request] = []
        self.full = 0

    def those(self, outcome: str) -> list[Request]:
        return [r for r in self.every if r.outcome == outcome]

    @rule(tenant=st.sampled_from("abc"), priority=st.integers(0, 2))
    def arrive(self, tenant: str, priority: int) -> None:
        request = Request(tenant, priority, len(self.every), WEIGHTS[tenant], self.clock.now, self.log)
        self.every.append(request)
        try:
            if self.queue.enter(request, tenant, request.weight, priority):
                request.admitted()
            elif not request.outcome:
                request.outcome = "waiting"
        except Problem as problem:
            request.refused(problem)

    @precondition(lambda self: self.those("running"))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.those("running"))).outcome = "done"
        self.queue.release()

    @precondition(lambda self: self.those("waiting"))
    @rule(data=st.data())
    def client_goes(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.those("waiting")))
        assert self.queue.leave(request)
        request.outcome = "left"

    @precondition(lambda self: self.every)
    @rule(data=st.data())
    def client_that_does_not_wait_goes(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.every))
        if request.outcome != "waiting":
            assert not self.queue.leave(request)

    @rule(seconds=st.integers(0, 6))
    def time_passes(self, seconds: int) -> None:
        self.clock.now += seconds
        due = [r for r in self.those("waiting") if self.clock.now - r.since >= 10]
        before = self.those("queue_timeout")
        self.queue.expire()
        expired = [r for r in self.those("queue_timeout") if r not in before]
        assert expired == due

    @rule(capacity=st.integers(0, 4))
    def replicas_change(self, capacity: int) -> None:
        self.capacity = capacity
        self.queue.fill()

    @invariant()
    def slots_are_counted(self) -> None:
        running = len(self.those("running"))
        assert self.queue.running == running
        assert self.queue.waiting == len(self.those("waiting")) <= MAX_WAITING

    @invariant()
    def no_slot_is_idle_while_somebody_waits(self) -> None:
        assert not self.queue.waiting or self.queue.running >= self.capacity

    @invariant()
    def none_is_refused_a_place_while_there_is_one(self) -> None:
        if len(self.those("queue_full")) > self.full:
            self.full = len(self.those("queue_full"))
            assert self.queue.waiting == MAX_WAITING

    @invariant()
    def within_a_tenant_the_first_is_first(self) -> None:
        for tenant in "abc":
            for priority in range(3):
                numbers = [r.number for r in self.log if (r.tenant, r.priority) == (tenant, priority)]
                assert numbers == sorted(numbers)

    def teardown(self) -> None:
        self.replicas_change(4)
        while running := self.those("running"):
            running[0].outcome = "done"
            self.queue.release()
        assert (self.queue.running, self.queue.waiting, self.queue.oldest_age()) == (0, 0, 0.0)
        assert not self.queue._bands
        assert all(r.outcome not in ("", "waiting") for r in self.every)


TestQueue = QueueMachine.TestCase


@given(st.lists(st.tuples(st.integers(1, 10), st.booleans()), min_size=1, max_size=6), st.integers(1, 120))
def test_in_a_backlog_nobody_is_a_request_away_from_its_share(tenants: list[tuple[int, bool]], served: int) -> None:
    """Some have all their requests in the queue, others enter the next one when the last one has gone: no way to the front."""
    queue = AdmissionQueue(lambda: 1, 10_000, 1e9, Clock())
    assert queue.enter(Request("first"), "first")
    log: list[Request] = []
    waiting = [0] * len(tenants)
    total = sum(weight for weight, _ in tenants)
    for count in range(1, served + 1):
        for number, (weight, one_by_one) in enumerate(tenants):
            while waiting[number] < (1 if one_by_one else 20):
                queue.enter(Request(str(number), log=log), str(number), weight)
                waiting[number] += 1
        queue.release()
        waiting[int(log[-1].tenant)] -= 1
        for number, (weight, _) in enumerate(tenants):
            share = Fraction(count * weight, total)
            assert abs(sum(r.tenant == str(number) for r in log) - share) < 1 + 1e-6


def test_who_was_away_has_saved_up_nothing() -> None:
    queue = AdmissionQueue(lambda: 1, 10_000, 1e9, Clock())
    log: list[Request] = []
    queue.enter(Request("a"), "a")
    for _ in range(200):
        queue.enter(Request("a", log=log), "a")
    queue.enter(Request("b", log=log), "b")
    for _ in range(100):
        queue.release()
    for _ in range(50):
        queue.enter(Request("b", log=log), "b")
    for _ in range(20):
        queue.release()
    assert [r.tenant for r in log[-20:]].count("b") in (10, 11)


def test_priority_is_strict_but_for_a_share() -> None:
    queue = AdmissionQueue(lambda: 1, 10_000, 1e9, Clock())
    log: list[Request] = []
    queue.enter(Request("x"), "x")
    for priority in (2, 1, 0):
        for _ in range(100):
            queue.enter(Request("a", priority, log=log), "a", 1.0, priority)
    for _ in range(64):
        queue.release()
    order = [r.priority for r in log]
    assert order.count(0) == 64 - 64 // PASSED_OVER
    assert order[: PASSED_OVER - 1] == [0] * (PASSED_OVER - 1)
    assert order.count(2) >= 1


def test_one_tenant_cannot_fill_the_queue_for_others() -> None:
    queue = AdmissionQueue(lambda: 1, 10, 60.0, Clock())
    queue.enter(Request("flood"), "flood")
    flood = [Request("flood") for _ in range(10)]
    for request in flood:
        assert not queue.enter(request, "flood")
    with pytest.raises(Problem, match="saturated"):
        queue.enter(Request("flood"), "flood")
    others = [Request("other") for _ in range(5)]
    for request in others:
        assert not queue.enter(request, "other")
    assert [r.outcome for r in flood] == [""] * 5 + ["queue_full"] * 5
    with pytest.raises(Problem) as full:
        queue.enter(Request("other"), "other")  # its share is used up too
    assert full.value.reason == "queue_full"
    assert queue.waiting == 10


def test_retry_after_is_what_the_last_one_waited() -> None:
    clock = Clock()
    queue = AdmissionQueue(lambda: 1, 1, 30.0, clock)
    queue.enter(Request("a"), "a")
    queue.enter(Request("a"), "a")
    clock.now += 7.5
    assert queue.oldest_age() == 7.5
    queue.release()
    queue.enter(Request("a"), "a")
    with pytest.raises(Problem) as full:
        queue.enter(Request("a"), "a")
    assert full.value.retry_after == 8


def test_a_thousand_that_fail_at_once_do_not_recurse() -> None:
    queue = AdmissionQueue(lambda: 1, 5000, 30.0, Clock())

    class Failing(Request):
        def admitted(self) -> None:
            super().admitted()
            queue.release()  # no replica took it

    queue.enter(Request("a"), "a")
    failing = [Failing("a") for _ in range(5000)]
    for request in failing:
        queue.enter(request, "a")
    queue.release()
    assert (queue.running, queue.waiting) == (0, 0)
    assert all(r.outcome == "running" for r in failing)


def test_what_a_refused_one_does_next_is_not_lost() -> None:
    """A refused request's connection may hold a second one, which enters at once."""
    clock = Clock()
    queue = AdmissionQueue(lambda: 1, 2, 5.0, clock)
    second = Request("a")

    class Pipelined(Request):
        def refused(self, problem: Problem) -> None:
            super().refused(problem)
            assert not queue.enter(second, "a")

    queue.enter(Request("a"), "a")
    queue.enter(Pipelined("a"), "a")
    clock.now += 5.0
    queue.expire()
    assert (second.outcome, queue.waiting) == ("", 1)
    clock.now += 5.0
    queue.expire()
    assert (second.outcome, queue.waiting) == ("queue_timeout", 0)


def test_who_enters_when_capacity_has_risen_comes_after_those_who_wait() -> None:
    capacity = 1
    queue = AdmissionQueue(lambda: capacity, 10, 30.0, Clock())
    queue.enter(Request("a"), "a")
    waits = Request("a")
    queue.enter(waits, "a")
    capacity = 3
    assert queue.enter(Request("a"), "a")
    assert (waits.outcome, queue.running) == ("running", 3)
    assert not queue.enter(Request("a"), "a")


def test_a_slot_given_back_twice_is_noticed() -> None:
    queue = AdmissionQueue(lambda: 1, 1, 1.0, Clock())
    queue.enter(Request("a"), "a")
    queue.release()
    with pytest.raises(AssertionError, match="twice"):
        queue.release()
