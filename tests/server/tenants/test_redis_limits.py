"""pytest tests/server/tenants/test_redis_limits.py: limits that several gateways share, in a real Redis."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvgate.errors import Problem, UsageError
from server.tenants.budget import Lease, Limits, UnlimitedLease
from server.tenants.limits import MemoryLimits
from server.tenants.redis_limits import RedisLimits
from tests.fakes.ports import refused_port, silent_port
from tests.server.tenants.redis_server import RedisServer


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def gateway(url: str, limits: Limits, **options: object) -> AsyncIterator[RedisLimits]:
    shared = RedisLimits(url, lambda tenant: limits, **{"timeout": 5.0, **options})  # type: ignore[arg-type]
    await shared.start()
    try:
        yield shared
    finally:
        await shared.stop()


async def granted(limits: RedisLimits, tokens: int = 0, tenant: str = "acme") -> Lease:
    lease = await limits.acquire(tenant, tokens)
    assert not isinstance(lease, Problem), lease
    return lease


async def refused(limits: RedisLimits, tokens: int = 0, tenant: str = "acme") -> Problem:
    problem = await limits.acquire(tenant, tokens)
    assert isinstance(problem, Problem)
    return problem


async def test_two_gateways_grant_one_limit(redis: RedisServer) -> None:
    limits = Limits(requests_per_minute=10, concurrency=8)
    async with AsyncExitStack() as stack:
        both = [await stack.enter_async_context(gateway(redis.url, limits)) for _ in range(2)]
        answers = await asyncio.gather(*(both[n % 2].acquire("acme", 0) for n in range(40)))
        leases = [answer for answer in answers if not isinstance(answer, Problem)]
        assert len(leases) == 8
        assert {problem.reason for problem in answers if isinstance(problem, Problem)} == {"concurrency"}
        for lease in leases:
            lease.release()
            lease.release()
        for shared in both:
            await shared.settled()
        again = await asyncio.gather(*(both[n % 2].acquire("acme", 0) for n in range(8)))
        assert sum(not isinstance(answer, Problem) for answer in again) == 2
        problem = await refused(both[0])
        assert (problem.status, problem.code, problem.reason) == (429, "rate_limit_exceeded", "requests")
        assert problem.retry_after == 6
        await granted(both[0], tenant="other")


async def test_an_answer_takes_one_round_trip(redis: RedisServer) -> None:
    async with gateway(redis.url, Limits(10, 1000, 1000, 5)) as shared:
        await granted(shared)  # loads the script
        before = redis.calls()
        lease = await granted(shared, 10)
        assert redis.calls() == before + 1
        lease.settle(5, 5, 5)
        lease.release()
        await shared.settled()
        assert redis.calls() <= before + 3


async def test_a_burst_waits_for_no_connection(redis: RedisServer) -> None:
    async with gateway(redis.url, Limits(requests_per_minute=1500, concurrency=1500)) as shared:
        answers = await asyncio.gather(*(shared.acquire("acme", 1) for _ in range(2000)))
        leases = [answer for answer in answers if not isinstance(answer, Problem)]
        assert 1500 <= len(leases) < 1600  # the bucket refills meanwhile, 25 a second
        for lease in leases:
            lease.settle(1, 1, 1)
            lease.release()
        await shared.settled()
        assert (shared.unreachable, shared.unsettled) == (0, 0)
        assert "kvgate:{acme}:leases" not in redis.names()


async def test_who_leaves_while_it_waits_keeps_nothing(redis: RedisServer) -> None:
    async with gateway(redis.url, Limits(input_tokens_per_minute=100, concurrency=1)) as shared:
        (await granted(shared)).release()
        await shared.settled()
        for turns in range(12):
            leaving = asyncio.create_task(shared.acquire("acme", 100))
            for _ in range(turns):
                await asyncio.sleep(0)
            leaving.cancel()
            with suppress(asyncio.CancelledError):
                lease = await leaving
                assert not isinstance(lease, Problem)
                lease.settle(0, 0, 0)
                lease.release()
            await shared.settled()
            assert "kvgate:{acme}:leases" not in redis.names()
        await granted(shared, 100)


async def test_who_has_no_limits_needs_no_redis() -> None:
    with refused_port() as port:
        async with gateway(f"redis://127.0.0.1:{port}", Limits()) as shared:
            assert isinstance(await granted(shared, 10**9), UnlimitedLease)
            assert shared.unreachable == 0


async def test_keys_expire_when_they_say_nothing_more(redis: RedisServer) -> None:
    async with gateway(redis.url, Limits(60, 600, 600, 2)) as shared:
        lease = await granted(shared, 300)
        assert 20_000 < redis.ttl_ms("kvgate:{acme}:levels") <= 31_000  # half a bucket
        assert 50_000 < redis.ttl_ms("kvgate:{acme}:leases") <= 60_000
        lease.settle(300, 0, 1200)
        lease.release()
        await shared.settled()
        assert 110_000 < redis.ttl_ms("kvgate:{acme}:levels") <= 121_000  # a debt takes longer
        assert redis.names() == {"kvgate:{acme}:levels"}


async def test_places_of_a_gateway_that_died_come_back(redis: RedisServer) -> None:
    clock = Clock()
    limits = Limits(concurrency=1)
    async with gateway(redis.url, limits, clock=clock) as living, gateway(redis.url, limits, clock=clock) as dead:
        await granted(dead)
        clock.now += 59
        await refused(living)
        clock.now += 2
        lease = await granted(living)
        for _ in range(5):
            clock.now += 50
            await living.renew()
            await refused(dead)
        lease.release()
        await living.renew()
        await living.settled()
        await granted(dead)


async def test_leases_are_renewed_by_themselves(redis: RedisServer) -> None:
    async with gateway(redis.url, Limits(concurrency=1), lease_seconds=1.0) as shared:
        lease = await granted(shared)
        await asyncio.sleep(1.5)
        await refused(shared)
        lease.release()


async def test_a_reload_counts_at_once(redis: RedisServer) -> None:
    limits = [Limits(requests_per_minute=1, concurrency=9)]
    shared = RedisLimits(redis.url, lambda tenant: limits[0], clock=Clock())
    lease = await granted(shared)
    await refused(shared)
    limits[0] = Limits(output_tokens_per_minute=60)
    lease.settle(1, 0, 60)
    lease.release()
    await shared.settled()
    assert (await refused(shared)).reason == "output_tokens"
    limits[0] = Limits()
    await granted(shared)
    await shared.stop()


async def test_too_large_is_said_without_asking() -> None:
    with refused_port() as port:
        async with gateway(f"redis://127.0.0.1:{port}", Limits(input_tokens_per_minute=100)) as shared:
            problem = await refused(shared, 101)
            assert (problem.reason, problem.retry_after) == ("input_tokens", None)


@pytest.mark.parametrize("ports", [refused_port, silent_port])
async def test_without_redis_requests_pass_or_not_as_configured(
    ports: Callable[[], object], caplog: pytest.LogCaptureFixture
) -> None:
    monotonic = Clock()
    with ports() as port:  # type: ignore[attr-defined]
        url = f"redis://:hidden@127.0.0.1:{port}"
        options = {"timeout": 0.1, "monotonic": monotonic}
        async with gateway(url, Limits(concurrency=1), **options) as shared:
            begun = time.monotonic()
            for _ in range(200):
                (await granted(shared)).release()
            assert time.monotonic() - begun < 1.0  # the time-out is paid once
            assert shared.unreachable == 200
            for _ in range(9):
                monotonic.now += 6.5
                await granted(shared)
            assert len(caplog.records) == 1
            monotonic.now += 1.5
            await granted(shared)
            assert len(caplog.records) == 2
        assert all("requests pass without limits" in record.getMessage() for record in caplog.records)
        assert "hidden" not in caplog.text

        async with gateway(url, Limits(concurrency=1), fail_open=False, **options) as shared:
            problem = await refused(shared)
            assert (problem.status, problem.code, problem.retry_after) == (503, "limits_unavailable", 1)
            assert shared.unreachable == 1


async def test_redis_comes_back(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    monotonic = Clock()
    with caplog.at_level(logging.WARNING):
        async with gateway(redis.url, Limits(requests_per_minute=1, concurrency=1), monotonic=monotonic) as shared:
            lease = await granted(shared)
            redis.stop()
            monotonic.now += 2
            lease.settle(1, 1, 1)
            lease.release()
            await shared.settled()
            assert shared.unsettled == 1
            await granted(shared)
            assert shared.unreachable == 1
            redis.start()
            await granted(shared)
            assert shared.unreachable == 2
            monotonic.now += 1.1
            await granted(shared)
            assert (await refused(shared)).status == 429
            assert shared.unreachable == 2


def test_a_wrong_address_is_refused() -> None:
    with pytest.raises(UsageError, match="the address of Redis is wrong"):
        RedisLimits("http://127.0.0.1", lambda tenant: Limits())


steps = st.tuples(
    st.floats(0, 40),
    st.integers(0, 120),
    st.tuples(
        st.none() | st.integers(0, 150), st.none() | st.integers(0, 150), st.none() | st.integers(0, 90)
    ),  # the engine's counts
    st.booleans(),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(steps, max_size=25),
    st.builds(
        Limits,
        st.none() | st.integers(1, 20),
        st.none() | st.integers(1, 100),
        st.none() | st.integers(1, 50),
        st.none() | st.integers(1, 4),
        st.sampled_from([0.0, 0.25, 1.0]),
    ),
)
def test_it_decides_as_the_limits_in_memory_do(
    redis: RedisServer,
    script: list[tuple[float, int, tuple[int | None, int | None, int | None], bool]],
    limits: Limits,
) -> None:
    async def play() -> None:
        redis.flush()
        clock = Clock()
        memory = MemoryLimits(lambda tenant: limits, clock)
        async with gateway(redis.url, limits, clock=clock, lease_seconds=1e6) as shared:
            running: list[tuple[Lease, Lease, tuple[int | None, int | None, int | None]]] = []
            for seconds, tokens, counts, ends in script:
                clock.now += seconds
                if ends and running:
                    *leases, known = running.pop(0)
                    for lease in leases:
                        lease.settle(*known)
                        lease.release()
                    await shared.settled()
                here, there = memory.acquire("acme", tokens), await shared.acquire("acme", tokens)
                if isinstance(here, Problem):
                    assert isinstance(there, Problem)
                    assert there.message == here.message
                    assert (there.retry_after, there.reason) == (here.retry_after, here.reason)
                else:
                    assert not isinstance(there, Problem)
                    running.append((here, there, counts))

    asyncio.run(play())
