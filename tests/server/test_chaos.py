"""Ten thousand requests of which most go wrong, in every way at once: afterwards nothing is left of them.

A failure prints the seed; CHAOS_SEED=... begins with the same draws (the order in which sockets wake is nobody's to repeat).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import secrets
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest

from server.exchange import protocol
from server.exchange.exchange import Exchange
from server.replicas import EngineUrl
from server.tenants.entries import KeyEntry, digest, new_secret
from server.tenants.limits import MemoryLimits
from tests.fakes.engine import FakeEngine
from tests.server.chaos import Chaos
from tests.server.running import RunningGateway, running_gateway
from tests.server.test_failover import until

REQUESTS = 10_000
CLIENTS = 60
# What stands for one request or one client, by class name, uvicorn's and httptools' among them: gone when it is over
SHORT_LIVED = (
    *("Counted", "Attempt", "Tally", "AnswerWriter", "MemoryLease", "PassedAnswer", "HeldAnswer", "EventStream"),
    *("EventBuffer", "ClientConnection", "HttpRequestParser", "RequestResponseCycle"),
)
COLLECTED = ("EngineConnection",)  # it and its parser refer to each other


class Counted(Exchange):
    """Counts the requests that reached the exchange."""

    __slots__ = ()
    made: ClassVar[int] = 0

    def __init__(self, *args: object) -> None:
        type(self).made += 1
        super().__init__(*args)  # type: ignore[arg-type]


async def test_nothing_is_left_of_ten_thousand_broken_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seed = int(os.environ.get("CHAOS_SEED") or secrets.randbelow(2**32))
    print(f"CHAOS_SEED={seed}")
    monkeypatch.setattr(protocol, "Exchange", Counted)
    monkeypatch.setattr(Counted, "made", 0)
    caplog.set_level(logging.WARNING)
    before = asyncio.all_tasks()
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine()) for _ in range(4)]
        keys = key_file(tmp_path / "keys")
        gateway = await stack.enter_async_context(
            running_gateway(
                *(engine.url for engine in engines),
                key_file=str(tmp_path / "keys"),
                max_inflight_per_replica=8,
                queue_size=24,
                queue_timeout=0.6,
                first_byte_timeout=0.25,
                idle_timeout=0.25,
                header_timeout=0.25,
                body_timeout=0.25,
                keep_alive_timeout=1.0,
                max_body_bytes=300_000,
                scrape_interval=2.0,
            )
        )
        chaos = Chaos(seed, gateway.port, keys)
        for engine in engines:
            engine.always(chaos.engine)
        tasks = await settled(gateway, engines)
        asked = 0
        gc.collect()
        gc.disable()  # what only the collector frees is a leak here: between two of its runs it is memory
        stack.callback(gc.enable)
        for half in (1, 2):
            await storm(gateway, chaos, engines, random.Random(seed + half), REQUESTS * half // 2)
            assert (await settled(gateway, engines)) == tasks
            asked += sum(len(engine.posts) for engine in engines)
            for engine in engines:
                engine.requests.clear()
            assert alive(SHORT_LIVED) == {}
            gc.collect()
            assert alive(COLLECTED) == {}

        exchange = {int(code): count for code, count in codes(gateway).items()}
        assert sum(exchange.values()) == gateway.metric("kvgate_requests_total") == Counted.made >= REQUESTS
        assert all(count <= exchange.get(code, 0) for code, count in chaos.seen.items()), (chaos.seen, exchange)
        assert {200, 400, 401, 404, 413, 429, 499, 500, 502, 503, 504} <= exchange.keys()
        assert exchange[200] > REQUESTS / 10  # most of it was not merely refused
        # Nothing is sent twice but what was counted as sent again (its replica's series may be gone since)
        assert asked <= Counted.made
        assert all(engine.failures == [] for engine in engines)
    assert asyncio.all_tasks() == before
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


def key_file(path: Path) -> list[str]:
    """Keys of three tenants: one alone, one with little, one that is urgent."""
    tenants = ("alone", "little", "urgent")
    secrets = [new_secret() for _ in tenants]
    lines = [
        KeyEntry(f"k-{t}", t, "operator", digest(s.encode())).line() for t, s in zip(tenants, secrets, strict=True)
    ]
    lines += [b'{"tenant":"little","concurrency":5}', b'{"tenant":"urgent","priority":-1,"weight":3}']
    path.write_bytes(b"\n".join([*lines, b""]))
    path.chmod(0o600)
    return secrets


async def storm(
    gateway: RunningGateway, chaos: Chaos, engines: list[FakeEngine], chance: random.Random, until_made: int
) -> None:
    """Clients come and go, engines too, until so many requests were made; afterwards all engines are back."""

    async def worker() -> None:
        while Counted.made < until_made:
            await chaos.client()

    async def weather() -> None:
        replicas = gateway.gateway.replicas
        urls = [EngineUrl.parse(engine.url) for engine in engines]
        try:
            while True:
                await asyncio.sleep(0.1)
                engine = chance.choice(engines[1:])
                match chance.randrange(3):
                    case 0:
                        await engine.stop()
                        await asyncio.sleep(0.05)
                        await engine.start()
                    case 1:
                        replicas.reconcile(chance.sample(urls, chance.randint(1, 3)))
                        await asyncio.sleep(chance.choice((0.0, 0.05, 0.3)))  # they may come back while they drain
                        replicas.reconcile(urls)
                    case 2:
                        await engine.drop_idle()
        finally:
            replicas.reconcile(urls)

    changing = asyncio.create_task(weather())
    try:
        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(worker())
    finally:
        changing.cancel()
        await asyncio.gather(changing, return_exceptions=True)
    for engine in engines:
        await engine.stop()
        await engine.start()


async def settled(gateway: RunningGateway, engines: list[FakeEngine]) -> Counter[str]:
    """Once the clients are gone nothing may be open, anywhere. Returns the tasks that run, by name."""
    kit = gateway.gateway
    await until(lambda: not kit.connections)
    await until(lambda: not kit.replicas.draining and all(replica.up for replica in kit.replicas.all))
    assert isinstance(kit.limits, MemoryLimits)
    for engine in engines:
        await engine.wait_for(lambda engine=engine: engine.running == 0)  # type: ignore[misc]
        assert gateway.metric("kvgate_inflight_requests", replica=f"127.0.0.1:{engine.port}") == 0
    assert len(kit.replicas.all) == len(engines)
    assert (kit.queues.waiting, kit.queues.running) == (0, 0)
    assert [kit.limits.running(tenant) for tenant in ("alone", "little", "urgent")] == [0, 0, 0]
    assert gateway.metric("kvgate_queue_requests") == 0
    for replica in kit.replicas.all:
        replica.pool.close()
    expected: Counter[str] = Counter()
    for _ in range(200):  # health checks and scrapes are under way at times
        await asyncio.sleep(0.01)
        expected = Counter(str(task.get_coro().__qualname__) for task in asyncio.all_tasks())  # type: ignore[union-attr]
        if not any("connect" in name.lower() for name in expected):
            break
    return expected


def codes(gateway: RunningGateway) -> Counter[str]:
    found: Counter[str] = Counter()
    for series in gateway.gateway.metrics.every_series:
        for code, count in series.codes.items():
            found[str(code)] += count
    return found


def alive(kinds: tuple[str, ...]) -> dict[str, int]:
    """Objects of these classes. One connection is still known to the sweep, which looked at it last."""
    names = Counter(type(thing).__name__ for thing in gc.get_objects())
    return {kind: names[kind] for kind in kinds if names[kind] > (kind == "ClientConnection")}
