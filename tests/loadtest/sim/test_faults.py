"""pytest tests/loadtest/sim/test_faults.py: faults over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from loadtest.sim.faults import Faults, Injector
from loadtest.sim.fleet import Fleet
from tests.loadtest.sim.small import cached, complete, get, metric, post, settings, until

IDS = list(range(1000, 1100))


async def status(url: str, **more: Any) -> int:
    return (await post(f"{url}/v1/completions", {"prompt": IDS, "max_tokens": 2, **more}))[0]


async def read_all(url: str, body: Any, received: bytearray) -> None:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
        async for data in response.content.iter_any():
            received += data


async def test_errors_come_at_their_share_and_leave_health_alone() -> None:
    async with Fleet(settings(faults=Faults(error_share=0.5, error_status=502))) as fleet:
        url = fleet.replicas[0].url
        statuses = [await status(url) for _ in range(40)]
        assert set(statuses) == {200, 502}
        assert await get(f"{url}/health") == ""
        assert await post(f"{url}/sim/faults", {"error_share": None}) == (
            200,
            {"faults": Faults(error_status=502).as_dict()},
        )
        assert {await status(url) for _ in range(10)} == {200}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_reset_comes_after_so_many_tokens(stream: bool) -> None:
    async with Fleet(settings(faults=Faults(reset_share=1, reset_after_tokens=3))) as fleet:
        one = fleet.replicas[0]
        received = bytearray()
        with pytest.raises(aiohttp.ClientError):
            await read_all(one.url, {"prompt": IDS, "max_tokens": 50, "ignore_eos": True, "stream": stream}, received)
        assert (b"data:" in received) == stream
        assert b"[DONE]" not in received
        engine = one.engine
        assert engine
        await until(lambda: engine.scheduler.cache.pool.usage == 0)


async def test_a_reset_before_the_first_token_gives_no_answer() -> None:
    async with Fleet(settings(faults=Faults(reset_share=1))) as fleet, aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.post(f"{fleet.replicas[0].url}/v1/completions", json={"prompt": IDS, "stream": True})


async def test_a_stalled_engine_is_healthy_and_answers_when_the_stall_is_lifted() -> None:
    async with Fleet(settings(faults=Faults(stall_s=3600))) as fleet:
        one = fleet.replicas[0]
        asking = asyncio.create_task(complete(one.url, IDS))
        engine = one.engine
        assert engine
        await until(lambda: len(engine.scheduler.waiting) == 1)
        assert await get(f"{one.url}/health") == ""
        assert not asking.done()
        await post(f"{one.url}/sim/faults", {"stall_s": 0})
        assert (await asking)["usage"]["completion_tokens"] == 4


async def test_a_replica_that_is_down_loses_its_connections_and_takes_none() -> None:
    async with Fleet(settings(replicas=2, decode_s=0.001)) as fleet, aiohttp.ClientSession() as session:
        one, other = fleet.replicas
        before = one.engine
        assert before
        body = {"prompt": IDS, "max_tokens": 3000, "ignore_eos": True, "stream": True}
        response = await session.post(f"{one.url}/v1/completions", json=body)
        await until(lambda: bool(before.scheduler.running))
        assert (await post(f"{other.url}/sim/faults?replica=0", {"restart_down_s": 3600}))[0] == 200
        with pytest.raises(aiohttp.ClientError):
            await response.read()
        with pytest.raises(aiohttp.ClientConnectionError):
            await get(f"{one.url}/health")
        await until(lambda: before.scheduler.cache.pool.usage == 0)
        assert await cached(other.url, IDS) == 0


async def test_a_restarted_replica_comes_back_empty_on_its_port() -> None:
    async with Fleet(settings(replicas=2)) as fleet:
        one, other = fleet.replicas
        assert [await cached(url, IDS) for url in (one.url, one.url, other.url, other.url)] == [0, 96, 0, 96]
        await post(f"{other.url}/sim/faults?replica=0", {"restart_down_s": 0.01})
        await until(lambda: one.healthy)
        assert await metric(one.url, "vllm:prefix_cache_queries_total") == 0
        assert [await cached(url, IDS) for url in (one.url, other.url)] == [0, 96]


async def test_a_replica_can_be_asked_to_restart_itself_and_all_can_be_set_at_once() -> None:
    async with Fleet(settings(replicas=3)) as fleet:
        urls = [one.url for one in fleet.replicas]
        await post(f"{urls[0]}/sim/faults?replica=all", {"error_share": 1, "restart_down_s": 0})
        await until(lambda: all(one.healthy for one in fleet.replicas))
        assert [await status(url) for url in urls] == [503, 503, 503]
        assert '"restart_down_s":0' in await get(f"{urls[2]}/sim/faults")


async def test_slow_steps_take_their_factor() -> None:
    now = 0.0
    injector = Injector(Faults(slow_start_s=10, slow_start_factor=5), 0, lambda: now)
    assert injector.factor() == 5
    now = 10
    assert injector.factor() == 1
    injector.restarted()
    assert injector.factor() == 5
    injector.change({"slow_start_s": 0})
    assert injector.factor() == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nonsense": 1}, "there is no such fault; there are stall_s, "),
        ({"error_share": 2}, "error_share: give a share"),
        ({"error_share": True}, "error_share: give a share"),
        ({"stall_s": -1}, "stall_s: give seconds"),
        ({"error_status": 200}, "error_status: give an HTTP status"),
        ({"slow_start_factor": 0}, "slow_start_factor: give a factor"),
        ({"reset_after_tokens": 0.5}, "reset_after_tokens: give a number of tokens"),
    ],
)
async def test_a_wrong_fault_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    async with Fleet(settings()) as fleet:
        url = fleet.replicas[0].url
        code, body = await post(f"{url}/sim/faults", {"error_share": 1, **given})
        assert code == 400
        assert said in body["error"]["message"]
        assert await status(url) == 200


async def test_an_unknown_replica_is_refused() -> None:
    async with Fleet(settings()) as fleet:
        code, body = await post(f"{fleet.replicas[0].url}/sim/faults?replica=1", {})
        assert (code, body["error"]["message"]) == (400, "replica=1: give all, or a number from 0 to 0")
