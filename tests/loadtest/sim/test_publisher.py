"""pytest tests/loadtest/sim/test_publisher.py: KV events over real ZMQ sockets, read as a gateway reads them."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
import zmq
import zmq.asyncio

from kvgate.errors import SetupError
from loadtest.sim.faults import Faults
from loadtest.sim.fleet import Fleet
from loadtest.sim.hashing import event_id
from loadtest.sim.publisher import Endpoints
from loadtest.sim.replica import EventPlaces, Replica
from tests.loadtest.sim.small import complete, get, post, settings, until

Batch = tuple[int, list[dict[str, Any]]]  # its number and its events


class Reader:
    """What a gateway keeps: sockets for live events and for replays."""

    def __init__(self, context: zmq.asyncio.Context, endpoints: Endpoints) -> None:
        self._live, self._past = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        self._live.connect(endpoints.publish)
        self._past.connect(endpoints.replay)

    async def live(self) -> Batch:
        async with asyncio.timeout(20):
            topic, number, payload = await self._live.recv_multipart()
        assert topic == b""
        return self._read(number, payload)

    async def replay(self, first: int = 0) -> list[Batch]:
        await self._past.send_multipart([b"", first.to_bytes(8, "big")])
        batches = []
        async with asyncio.timeout(20):
            while True:
                empty, topic, number, payload = await self._past.recv_multipart()
                assert empty == topic == b""
                if not payload:
                    assert int.from_bytes(number, "big", signed=True) == -1
                    return batches
                batches.append(self._read(number, payload))

    def _read(self, number: bytes, payload: bytes) -> Batch:
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        return int.from_bytes(number, "big"), events


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder whose path is short: a socket's address takes 107 characters."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        yield Path(folder)


@asynccontextmanager
async def fleet(folder: Path, **more: Any) -> AsyncIterator[Fleet]:
    async with Fleet(settings(events=EventPlaces(folder=str(folder)), **more)) as running:
        yield running


@asynccontextmanager
async def reader(replica: Replica) -> AsyncIterator[Reader]:
    context = zmq.asyncio.Context()
    try:
        assert replica.endpoints
        yield Reader(context, replica.endpoints)
    finally:
        context.destroy(linger=0)


def held(batches: list[Batch]) -> Counter[int]:
    """Copies of blocks by event id."""
    told: Counter[int] = Counter()
    for _, events in batches:
        for event in events:
            if event["type"] == "BlockStored":
                told.update(event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                told.subtract(event["block_hashes"])
            else:
                told.clear()
    return +told


def holds(replica: Replica) -> Counter[int]:
    assert replica.engine
    return Counter(event_id(block.hash) for block in replica.engine.scheduler.cache.pool.blocks if block.hash)


async def work(replica: Replica) -> None:
    asked = [complete(replica.url, [number % 12] * (40 + 3 * number), cache_salt="s") for number in range(20)]
    await asyncio.gather(*asked)


async def test_a_replay_tells_what_the_cache_holds(sockets: Path) -> None:
    async with fleet(sockets, blocks=40) as running, reader(running.replicas[0]) as events:
        one = running.replicas[0]
        await work(one)
        batches = await events.replay()
        assert [number for number, _ in batches] == list(range(len(batches)))
        assert held(batches) == holds(one) != Counter()
        assert any(event["type"] == "BlockRemoved" for _, batch in batches for event in batch)
        stored = next(event for _, batch in batches for event in batch if event.get("parent_block_hash", 0) is None)
        assert stored["extra_keys"][0] == ["s"]
        assert stored["medium"] == "GPU"
        assert len(stored["token_ids"]) == 16 * len(stored["block_hashes"])
        assert await events.replay(3) == batches[3:]


async def test_live_events_come_in_order_and_a_reset_is_told(sockets: Path) -> None:
    async with fleet(sockets) as running, reader(running.replicas[0]) as events:
        one = running.replicas[0]
        first = asyncio.ensure_future(events.live())
        while not first.done():  # the subscription is there when the first event is
            await complete(one.url, [1] * 20, cache_salt=os.urandom(4).hex())
        number, _ = await first
        await post(f"{one.url}/reset_prefix_cache")
        await complete(one.url, [1] * 20)  # an idle engine tells of a reset with its next step
        kinds: list[str] = []
        while kinds != ["AllBlocksCleared", "BlockStored"]:
            number += 1
            later, batch = await events.live()
            kinds = [event["type"] for event in batch]
            assert later == number


async def test_lost_frames_leave_gaps_that_a_replay_fills(sockets: Path) -> None:
    async with fleet(sockets, faults=Faults(event_loss_share=0.5)) as running, reader(running.replicas[0]) as events:
        one = running.replicas[0]
        first = asyncio.ensure_future(events.live())
        while not first.done():
            await complete(one.url, [1] * 20, cache_salt=os.urandom(4).hex())
        for number in range(30):
            await complete(one.url, [number] * 20)
        await post(f"{one.url}/sim/faults", {"event_loss_share": 0})
        await complete(one.url, [99] * 20)
        everything = await events.replay()
        numbers = [(await first)[0]]
        while numbers[-1] < everything[-1][0]:
            numbers.append((await events.live())[0])
        assert numbers == sorted(numbers)
        assert len(numbers) < numbers[-1] - numbers[0] + 1
        assert held(everything) == holds(one)


async def test_numbers_begin_anew_after_a_restart(sockets: Path) -> None:
    async with fleet(sockets, replicas=2) as running, reader(running.replicas[1]) as events:
        one = running.replicas[1]
        await work(one)
        assert len(await events.replay()) > 3
        await post(f"{one.url}/sim/faults", {"restart_down_s": 0})
        await until(lambda: one.healthy)
        async with reader(one) as again:
            assert await again.replay() == []
            await complete(one.url, [5] * 20)
            assert [number for number, _ in await again.replay()] == [0]


async def test_each_replica_has_ports_of_its_own_and_says_which() -> None:
    places = EventPlaces(port=5557)
    assert places.of("127.0.0.1", 2, 9003) == Endpoints("tcp://127.0.0.1:5561", "tcp://127.0.0.1:5562")


async def test_the_sources_are_those_that_vllm_names(sockets: Path) -> None:
    async with fleet(sockets) as running:
        one = running.replicas[0]
        (source,) = orjson.loads(await get(f"{one.url}/kv_event_sources")).values()
        assert source["endpoint"] == f"ipc://{sockets}/kv-{one.port}.sock"
        assert source["replay_endpoint"] == f"ipc://{sockets}/replay-{one.port}.sock"


async def test_an_address_that_cannot_be_had_ends_the_start(sockets: Path) -> None:
    with pytest.raises(SetupError, match="KV events cannot be published"):
        async with fleet(sockets / "missing"):
            pass


async def test_a_port_that_is_taken_ends_the_start() -> None:
    async with Fleet(settings()) as running:
        with pytest.raises(SetupError, match="cannot be bound"):
            async with Fleet(settings(port=running.replicas[0].port)):
                pass
