"""Engines that fail, under load: the others take over at once, and an engine that recovers is used again within seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.fakes import behaviours
from tests.fakes.connection import Received, Writer
from tests.fakes.engine import FakeEngine
from tests.server.load import PLAIN, STREAM, ask, load
from tests.server.running import RunningGateway, running_gateway


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def breaker(gateway: RunningGateway, engine: FakeEngine) -> float | None:
    return gateway.metric("kvgate_breaker_open", replica=f"127.0.0.1:{engine.port}")


async def poisoned(request: Received, writer: Writer) -> None:
    """An engine that breaks on some prompts."""
    if b"poison" in request.body:
        await behaviours.status(500)(request, writer)
    else:
        await behaviours.Whole()(request, writer)


@pytest.mark.parametrize("engines", [1, 2])
async def test_requests_that_every_engine_fails_on_take_nobody_else_down(engines: int) -> None:
    fakes = [FakeEngine() for _ in range(engines)]
    for fake in fakes:
        await fake.start()
        fake.always(poisoned)
    async with running_gateway(*(fake.url for fake in fakes)) as gateway:
        for _ in range(4):
            assert (await ask(gateway, PLAIN.replace(b"hi", b"poison"))).status == 500
        assert [(await ask(gateway)).status for _ in range(20)] == [200] * 20
        async with load(gateway) as running:  # and while many of them come
            for _ in range(60):
                await ask(gateway, PLAIN.replace(b"hi", b"poison"))
            await running.more(50)
        assert running.failed == []
        assert gateway.inflight == 0
    for fake in fakes:
        await fake.stop()


async def test_an_engine_s_429_reaches_its_client_and_opens_nothing(engine: FakeEngine) -> None:
    engine.always(behaviours.status(429, headers=[("retry-after", "7")]))
    async with running_gateway(engine.url) as gateway:
        for _ in range(30):
            answer = await ask(gateway)
            assert (answer.status, answer.header("retry-after")) == (429, "7")
        assert breaker(gateway, engine) == 0
        engine.always(None)
        assert (await ask(gateway)).status == 200


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_an_engine_that_answers_it_cannot_costs_no_request(engine: FakeEngine, status: int) -> None:
    async with FakeEngine() as bad, running_gateway(engine.url, bad.url) as gateway:
        async with load(gateway) as running:
            await running.more(100)
            bad.always(behaviours.status(status))
            await until(lambda: breaker(gateway, bad) == 1)
            seen = len(bad.posts)
            await running.more(200)
            assert len(bad.posts) <= seen + 8  # those that were on their way, and probes
            bad.always(None)
            await until(lambda: breaker(gateway, bad) == 0)
            seen = len(bad.posts)
            await running.more(100)
            assert len(bad.posts) > seen + 20
        assert running.failed == []


async def test_a_dead_engine_s_share_goes_to_the_others_and_comes_back(engine: FakeEngine) -> None:
    async with FakeEngine() as other, running_gateway(engine.url, other.url, health_interval=0.5) as gateway:
        async with load(gateway) as running:
            await running.more(100)
            await other.stop()
            await until(lambda: breaker(gateway, other) == 1)
            lost = len(running.failed)
            assert lost <= 8  # at most what it was answering
            await running.more(300)
            assert len(running.failed) == lost
            assert gateway.metric("kvgate_replica_up", replica=f"127.0.0.1:{other.port}") == 0
            seen = len(other.posts)
            await other.start()
            await until(lambda: len(other.posts) > seen + 20, seconds=3.0)
            await running.more(100)
        assert len(running.failed) == lost


async def test_an_engine_that_resets_every_stream_is_left_out(engine: FakeEngine) -> None:
    async with FakeEngine() as bad, running_gateway(engine.url, bad.url, policy="round-robin") as gateway:
        bad.always(behaviours.Stream(stop_after=1, stop="reset"))
        cut = 0
        for _ in range(30):
            cut += not (await ask(gateway, STREAM)).complete
        assert 5 <= cut <= 7
        assert breaker(gateway, bad) == 1


async def test_a_health_check_that_is_slow_once_is_no_death(engine: FakeEngine) -> None:
    gate = asyncio.Event()
    async with running_gateway(engine.url, connect_timeout=0.1) as gateway:
        replica = gateway.gateway.replicas.all[0]
        engine.on_get("/health", behaviours.gated(gate))

        def checks() -> int:
            return sum(request.path == "/health" for request in engine.requests)

        before = checks()
        while checks() < before + 3:  # the third check without an answer in time is one too many
            assert replica.up
            await asyncio.sleep(0.005)
        await until(lambda: not replica.up)  # but silence does become one
        assert (await ask(gateway)).status == 503
        gate.set()
        engine.on_get("/health", None)
        await until(lambda: replica.up)
        assert (await ask(gateway)).status == 200


async def test_an_engine_that_says_it_is_ill_is_down_at_once(engine: FakeEngine) -> None:
    async with running_gateway(engine.url) as gateway:
        replica = gateway.gateway.replicas.all[0]
        engine.on_get("/health", behaviours.status(503))
        asked = len(engine.requests)
        await until(lambda: not replica.up)
        assert sum(r.path == "/health" for r in engine.requests[asked:]) == 1


async def test_a_lost_connection_is_looked_into_at_once(engine: FakeEngine) -> None:
    async with running_gateway(engine.url, health_interval=60.0) as gateway:
        await ask(gateway)
        seen = sum(r.path == "/health" for r in engine.requests)
        engine.script(behaviours.reset(), behaviours.reset())
        await ask(gateway)
        await until(lambda: sum(r.path == "/health" for r in engine.requests) > seen, seconds=2.0)
