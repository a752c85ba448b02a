"""The retry budget: a share of the requests, and a few for a quiet gateway."""

from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from server.retries import RetryBudget
from tests.server.clock import Clock


def test_a_quiet_gateway_may_retry_a_few() -> None:
    budget = RetryBudget(0.2, 3, 10.0, Clock())
    assert [budget.try_retry() for _ in range(4)] == [True, True, True, False]


def test_when_all_fails_a_fifth_is_retried() -> None:
    clock = Clock()
    budget = RetryBudget(0.2, 10, 10.0, clock)
    retried = 0
    for _ in range(10_000):
        clock.now += 0.01
        budget.request()
        retried += budget.try_retry()
    assert 0.19 * 10_000 <= retried <= 0.2 * 10_000 + 10 * 6


def test_an_engine_that_dies_among_two_is_covered() -> None:
    """1000 requests a second, half of those of the last 2 s are lost at once: all of them may go elsewhere."""
    clock = Clock()
    budget = RetryBudget(0.2, 10, 10.0, clock)
    for _ in range(15_000):
        clock.now += 0.001
        budget.request()
    assert all(budget.try_retry() for _ in range(1000))


def test_after_a_pause_old_requests_buy_no_retries() -> None:
    clock = Clock()
    budget = RetryBudget(0.2, 0, 10.0, clock)
    for _ in range(1000):
        budget.request()
    clock.now += 25.0
    assert not budget.try_retry()


@given(st.lists(st.tuples(st.sampled_from("rt"), st.floats(0, 3)), max_size=300), st.integers(0, 5))
def test_it_never_gives_more_than_its_share(steps: list[tuple[str, float]], floor: int) -> None:
    clock = Clock()
    begin = clock.now
    budget = RetryBudget(0.2, floor, 10.0, clock)
    requests = retries = 0
    for kind, pause in steps:
        clock.now += pause
        if kind == "r":
            budget.request()
            requests += 1
        else:
            retries += budget.try_retry()
        windows = (clock.now - begin) // 10.0 + 1
        assert retries <= 0.2 * requests + (floor + 1) * ceil(windows / 2)
