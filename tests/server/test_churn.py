"""Replicas that come and go under load: no request is lost, and nothing of a removed one stays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import generate_latest

from server.discovery.discovery import Discovery
from server.discovery.dns import DnsSource
from server.discovery.file import FileSource
from server.discovery.source import Source
from server.replicas import EngineUrl, Stage
from tests.fakes import behaviours
from tests.fakes.behaviours import Stream
from tests.fakes.engine import FakeEngine
from tests.server.load import STREAM, ask, load
from tests.server.running import RunningGateway, running_gateway
from tests.server.test_failover import until


@asynccontextmanager
async def discovering(source: Source, **settings: object) -> AsyncIterator[RunningGateway]:
    async with running_gateway(**settings) as gateway:
        discovery = Discovery([source], gateway.gateway.replicas.reconcile)
        await discovery.start()
        try:
            yield gateway
        finally:
            await discovery.stop()


async def all_up(gateway: RunningGateway, count: int) -> None:
    replicas = gateway.gateway.replicas
    await until(lambda: len(replicas.all) == count and all(r.up for r in replicas.all))


async def test_replicas_that_come_and_go_lose_no_request() -> None:
    fakes = [FakeEngine(port=0) for _ in range(4)]
    for fake in fakes:
        await fake.start()
        fake.always(Stream(pause=0.004, usage="always"))
    chance = random.Random(7)
    async with running_gateway(*(fake.url for fake in fakes)) as gateway:
        replicas = gateway.gateway.replicas
        async with load(gateway, clients=12) as running:
            for _ in range(12):
                kept = chance.sample(fakes, chance.randint(1, 3))
                replicas.reconcile([EngineUrl.parse(fake.url) for fake in kept])
                await running.more(15)
                replicas.reconcile([EngineUrl.parse(fake.url) for fake in fakes])
                await running.more(15)
        assert running.failed == []
        await gateway.idle()
        replicas.reconcile([EngineUrl.parse(fakes[0].url)])
        await until(lambda: not replicas.draining)
        page = generate_latest(gateway.gateway.metrics.registry).decode()
        assert f":{fakes[0].port}" in page
        for gone in fakes[1:]:
            assert f":{gone.port}" not in page
            await gone.wait_for(lambda gone=gone: gone.open_connections == 0)  # type: ignore[misc]
            seen = len(gone.requests)
            await asyncio.sleep(0.25)
            assert len(gone.requests) == seen  # nobody watches it any more
    for fake in fakes:
        await fake.stop()


async def test_a_removed_replica_finishes_what_it_has_begun(engine: FakeEngine) -> None:
    gate = asyncio.Event()
    async with FakeEngine() as other, running_gateway(engine.url, other.url) as gateway:
        replicas = gateway.gateway.replicas
        engine.always(behaviours.gated(gate, Stream()))
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(ask(gateway, STREAM)) for _ in range(2)]
            await engine.received(1)
            leaving = next(r for r in replicas.all if r.url.port == engine.port)
            replicas.reconcile([EngineUrl.parse(other.url)])
            for _ in range(5):
                assert (await ask(gateway)).status == 200
            assert len(engine.posts) == 1
            assert (leaving.stage, leaving.inflight) == (Stage.DRAINING, 1)
            assert gateway.metric("kvgate_inflight_requests", replica=leaving.name) == 1
            gate.set()
        assert all(task.result().events[-1] == b"[DONE]" for task in asked)
        await until(lambda: leaving.stage is Stage.GONE)
        assert gateway.metric("kvgate_inflight_requests", replica=leaving.name) is None


async def test_one_that_returns_while_it_drains_is_used_again(engine: FakeEngine) -> None:
    gate = asyncio.Event()
    async with FakeEngine() as other, running_gateway(engine.url, other.url) as gateway:
        replicas = gateway.gateway.replicas
        engine.script(behaviours.gated(gate))
        other.script(behaviours.gated(gate))
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(ask(gateway))
            await engine.received(1)
            before = set(replicas.all)
            replicas.reconcile([EngineUrl.parse(other.url)])
            await asyncio.sleep(0.3)
            replicas.reconcile([EngineUrl.parse(engine.url), EngineUrl.parse(other.url)])
            assert set(replicas.all) == before
            gate.set()
        for _ in range(4):
            await ask(gateway)
        assert len(engine.posts) == 3
        seen = len(engine.requests)
        await engine.wait_for(lambda: len(engine.requests) > seen)  # it is watched on


async def test_a_file_adds_and_removes_engines(engine: FakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "engines"

    def write(*lines: str) -> None:
        path.write_text("\n".join(lines))

    async with FakeEngine() as other:
        write(engine.url)
        async with discovering(FileSource(path, 0.05)) as gateway:
            await all_up(gateway, 1)
            async with load(gateway) as running:
                await running.more(20)
                write(engine.url, other.url)
                await all_up(gateway, 2)
                await other.wait_for(lambda: len(other.posts) > 10)
                write("nonsense")
                await asyncio.sleep(0.15)
                assert len(gateway.gateway.replicas.all) == 2
                write(other.url)
                await until(lambda: engine.running == 0 and not gateway.gateway.replicas.draining)
                await running.more(20)
            assert running.failed == []


async def test_a_name_is_looked_up_again_and_again(engine: FakeEngine) -> None:
    """A headless service: the addresses change, the port does not."""
    addresses = ["127.0.0.1"]

    async def resolve(name: str, port: int) -> list[str]:
        assert name == "vllm.models.svc"
        if not addresses:
            raise OSError("no such name")
        return addresses

    source = DnsSource("vllm.models.svc", engine.port, 0.02, resolve)
    async with discovering(source) as gateway:
        await all_up(gateway, 1)
        assert (await ask(gateway)).status == 200
        addresses.append("127.0.0.2")  # nobody listens there
        await until(lambda: len(gateway.gateway.replicas.all) == 2)
        assert [(await ask(gateway)).status for _ in range(6)] == [200] * 6
        addresses.clear()
        await asyncio.sleep(0.1)
        assert len(gateway.gateway.replicas.all) == 2
        addresses.append("127.0.0.1")
        await until(lambda: len(gateway.gateway.replicas.all) == 1 and not gateway.gateway.replicas.draining)
        assert (await ask(gateway)).status == 200


async def test_a_name_of_the_system_s_hosts_file(engine: FakeEngine) -> None:
    async with discovering(DnsSource("localhost", engine.port)) as gateway:
        replicas = gateway.gateway.replicas
        await until(lambda: replicas.ready)
        assert f"127.0.0.1:{engine.port}" in {r.name for r in replicas.all}  # and perhaps [::1]
        assert [(await ask(gateway)).status for _ in range(4)] == [200] * 4


async def test_the_engines_key_is_shown_to_it_by_the_health_check_too(engine: FakeEngine, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("engine-secret\n")
    async with running_gateway(engine.url, engine_key_file=str(key)):
        shown = {r.path: dict(r.headers).get("authorization") for r in engine.requests}
        assert shown["/v1/models"] == "Bearer engine-secret"
