"""When a replica gets no requests, and when it is tried again."""

import pytest

from server.breaker import Breaker, BreakerLimits
from tests.server.clock import Clock

LIMITS = BreakerLimits(consecutive=5, ratio=0.5, minimum=20, window=10.0, wait=1.0, longest_wait=8.0, patience=30.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(LIMITS, clock)


def opened(breaker: Breaker) -> Breaker:
    assert breaker.failed(at_once=True)
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_does_not(breaker: Breaker) -> None:
    for _ in range(10):
        assert [breaker.failed() for _ in range(4)] == [False] * 4
        for _ in range(20):
            breaker.succeeded()
    assert [breaker.failed() for _ in range(5)] == [False] * 4 + [True]
    assert breaker.out


def test_half_of_many_open_it(breaker: Breaker) -> None:
    changes = []
    for _ in range(10):
        changes.append(breaker.failed())
        breaker.succeeded()
    assert not any(changes)
    assert breaker.failed()  # 11 of 21
    assert breaker.out


def test_successes_from_before_the_window_do_not_hide_failures(breaker: Breaker, clock: Clock) -> None:
    for _ in range(10_000):
        breaker.succeeded()
    clock.now += 60
    for _ in range(11):
        breaker.failed()
        breaker.succeeded()
    assert breaker.out


def test_failures_from_before_the_window_are_forgotten(breaker: Breaker, clock: Clock) -> None:
    for _ in range(9):
        breaker.succeeded()
        breaker.failed()
    clock.now += 11
    breaker.succeeded()
    breaker.failed()
    assert not breaker.out


def test_a_probe_is_due_after_the_wait_and_one_at_a_time(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    due = [breaker.due]
    clock.now += 1.0
    due.append(breaker.due)
    breaker.probe()
    due.append(breaker.due)
    clock.now += 29
    due.append(breaker.due)
    assert due == [False, True, False, False]
    assert breaker.succeeded()
    assert (breaker.out, breaker.trips, breaker.probing) == (False, 0, 0)


def test_each_probe_that_fails_doubles_the_wait_within_bounds(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    waits = []
    for _ in range(6):
        before = clock.now
        while not breaker.due:
            clock.now += 0.5
        waits.append(clock.now - before)
        breaker.probe()
        assert not breaker.failed()
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    clock.now += 8
    breaker.probe()
    breaker.succeeded()
    opened(breaker)
    clock.now += 1.0
    assert breaker.due  # the waits begin anew


def test_many_that_fail_together_count_as_one_probe(breaker: Breaker, clock: Clock) -> None:
    """Where there is no better replica, requests go on although it is out."""
    opened(breaker)
    for _ in range(100):
        breaker.probe()
    clock.now += 1.0
    for _ in range(100):
        breaker.failed()
    clock.now += 2.0
    assert breaker.due


def test_requests_from_before_it_opened_say_nothing(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    assert not breaker.succeeded()
    assert breaker.out
    breaker.failed()
    breaker.gave_up()
    clock.now += 1.0
    assert breaker.due


def test_a_probe_whose_client_leaves_makes_room_for_the_next(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += 1.0
    breaker.probe()
    breaker.gave_up()
    assert breaker.due


def test_a_probe_that_says_nothing_does_not_keep_it_out_for_ever(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += 1.0
    breaker.probe()
    clock.now += 30.0
    assert breaker.due
    breaker.probe()
    assert breaker.probing == 2
    assert breaker.succeeded()
    assert breaker.probing == 0


def test_a_sign_of_life_makes_a_probe_due(breaker: Breaker) -> None:
    opened(breaker)
    breaker.wake()
    assert breaker.due


def test_a_closed_one_is_never_due(breaker: Breaker, clock: Clock) -> None:
    breaker.wake()
    clock.now += 100
    assert not breaker.due
    breaker.gave_up()
    assert breaker.probing == 0
