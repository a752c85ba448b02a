"""The events of several replicas: found, followed, counted, and gone with their replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest
from prometheus_client import CollectorRegistry

from kvcache.index import PrefixIndex
from kvcache.spelling import packed
from server.exchange.upstream import EnginePool
from server.ledger.feed import Speller
from server.ledger.feeds import EventFeeds
from server.ledger.sources import EventSources
from server.metrics import GatewayMetrics
from server.replica import EngineUrl, Replica
from tests.fakes import answers
from tests.fakes.engine import Behaviour, FakeEngine, Received, Writer
from tests.server.ledger.following import until
from tests.server.ledger.publisher import Publisher, stored
from tests.server.ledger.spelling import PLAIN, PackedSpeller

A = list(range(12))
B = list(range(100, 108))


class Feeds:
    """EventFeeds with what it is given, and what it says."""

    def __init__(self, setting: str) -> None:
        self.index = PrefixIndex()
        self.metrics = GatewayMetrics(CollectorRegistry())
        self.speller: Speller | None = PackedSpeller()
        self.changed: list[str] = []
        sources = EventSources.parse(setting)
        self.feeds = EventFeeds(self.index, self._speller, lambda r: self.changed.append(r.name), sources, self.metrics)

    def _speller(self, replica: Replica) -> Speller | None:
        return self.speller

    def metric(self, name: str, replica: Replica) -> float | None:
        return self.metrics.registry.get_sample_value(name, {"replica": replica.name})

    def routed(self, tokens: list[int], name: str) -> int:
        return self.index.match(packed(tokens), PLAIN).routed(name)

    async def holds(self, tokens: list[int], name: str) -> None:
        await until(lambda: self.routed(tokens, name) == len(tokens))


@asynccontextmanager
async def feeding(setting: str) -> AsyncIterator[Feeds]:
    made = Feeds(setting)
    try:
        yield made
    finally:
        await made.feeds.stop()


def replica_at(url: str = "http://127.0.0.1:8001", *, up: bool = True, blocks: int | None = 10) -> Replica:
    parsed = EngineUrl.parse(url)
    replica = Replica(parsed, EnginePool(parsed.host, parsed.port, tls=False), up=up)
    replica.kv_blocks = blocks
    return replica


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    made = Publisher(tmp_path)
    yield made
    made.close()


@pytest.fixture
def second(tmp_path: Path) -> Iterator[Publisher]:
    made = Publisher(tmp_path, "second")
    yield made
    made.close()


def stating(*publishers: Publisher) -> str:
    return ",".join(f"127.0.0.1:8001={one.address}+{one.replay_address}" for one in publishers)


def saying(*publishers: Publisher) -> bytes:
    """What an engine with these ranks answers of itself."""
    return orjson.dumps(
        {str(n): {"endpoint": one.address, "replay_endpoint": one.replay_address} for n, one in enumerate(publishers)}
    )


async def test_a_replica_s_events_are_followed_and_counted(publisher: Publisher) -> None:
    publisher.lose(stored(A))
    replica = replica_at()
    async with feeding(stating(publisher)) as fed:
        fed.feeds.add(replica)
        await fed.holds(A, replica.name)
        assert fed.feeds.names(replica) == (replica.name,)
        await until(lambda: fed.metric("kvgate_kv_cached_ratio", replica) == 0.3)
        assert fed.metric("kvgate_kv_event_gaps_total", replica) == 0
        await publisher.joined()
        publisher.lose(stored(B))
        publisher.publish(stored([7] * 4))
        await fed.holds(B, replica.name)
        assert fed.metric("kvgate_kv_event_gaps_total", replica) == 1
        assert replica.name in fed.changed


async def test_what_is_dropped_is_gone_at_once(publisher: Publisher) -> None:
    publisher.lose(stored(A))
    replica = replica_at()
    async with feeding(stating(publisher)) as fed:
        fed.feeds.add(replica)
        await fed.holds(A, replica.name)
        await until(lambda: fed.metric("kvgate_kv_cached_ratio", replica) is not None)
        fed.changed.clear()
        fed.feeds.drop(replica)
        assert fed.feeds.names(replica) == ()
        assert fed.routed(A, replica.name) == 0
        assert fed.metric("kvgate_kv_cached_ratio", replica) is None
        assert fed.metric("kvgate_kv_event_gaps_total", replica) is None
        assert fed.changed == [replica.name]
        publisher.publish(stored(B))
        await until(lambda: not fed.feeds._ending)
        assert fed.routed(B, replica.name) == 0
        fed.feeds.add(replica)
        await fed.holds(B, replica.name)


async def test_it_waits_for_the_engine_and_for_the_speller(publisher: Publisher) -> None:
    publisher.lose(stored(A))
    replica = replica_at(up=False)
    async with feeding(stating(publisher)) as fed:
        fed.speller = None
        fed.feeds.add(replica)
        await asyncio.sleep(0)
        replica.up = True
        fed.feeds.wake(replica)
        for _ in range(10):
            await asyncio.sleep(0)
        assert fed.feeds.names(replica) == ()
        fed.speller = PackedSpeller()
        fed.feeds.wake(replica)
        await fed.holds(A, replica.name)


async def test_another_speller_begins_anew(publisher: Publisher) -> None:
    publisher.lose(stored(A))
    replica = replica_at()
    async with feeding(stating(publisher)) as fed:
        fed.feeds.add(replica)
        await fed.holds(A, replica.name)
        before = len(publisher.asked)
        fed.speller = PackedSpeller()
        fed.feeds.wake(replica)
        await until(lambda: len(publisher.asked) > before)
        await fed.holds(A, replica.name)
        assert fed.index.held(replica.name) == 3


async def test_each_rank_has_a_cache_of_its_own(publisher: Publisher, second: Publisher) -> None:
    publisher.lose(stored(A))
    second.lose(stored(B))
    replica = replica_at()
    async with feeding(stating(publisher, second)) as fed:
        fed.feeds.add(replica)
        names = ("127.0.0.1:8001", "127.0.0.1:8001#1")
        await fed.holds(A, names[0])
        await fed.holds(B, names[1])
        assert fed.feeds.names(replica) == names
        assert fed.routed(B, names[0]) == fed.routed(A, names[1]) == 0
        assert fed.feeds.cached_ratio(replica) == 0.5
        fed.feeds.drop(replica)
        assert not fed.index.replicas


async def test_how_many_blocks_there_are_may_be_told_later(publisher: Publisher) -> None:
    publisher.lose(stored(A))
    replica = replica_at(blocks=None)
    async with feeding(stating(publisher)) as fed:
        fed.feeds.add(replica)
        await fed.holds(A, replica.name)
        assert fed.metric("kvgate_kv_cached_ratio", replica) is None
        replica.kv_blocks = 30
        fed.feeds.wake(replica)
        await until(lambda: fed.metric("kvgate_kv_cached_ratio", replica) == 0.1)
        assert fed.index.replicas[replica.name].limit < 100


async def test_off_follows_nothing() -> None:
    replica = replica_at()
    async with feeding("off") as fed:
        fed.feeds.add(replica)
        for _ in range(10):
            await asyncio.sleep(0)
        assert fed.feeds.names(replica) == ()


# -- engines that are asked


def answering(body: bytes, status: int = 200) -> Behaviour:
    async def behaviour(request: Received, writer: Writer) -> None:
        await answers.send_json(writer, status, body)

    return behaviour


async def test_an_engine_is_asked_where_its_events_are(engine: FakeEngine, publisher: Publisher) -> None:
    publisher.lose(stored(A))
    engine.on_get("/kv_event_sources", answering(saying(publisher)))
    replica = replica_at(engine.url)
    async with feeding("auto") as fed:
        fed.feeds.add(replica)
        await fed.holds(A, replica.name)


async def test_an_engine_that_cannot_be_asked_has_no_events(engine: FakeEngine) -> None:
    replica = replica_at(engine.url)
    async with feeding("auto") as fed:
        fed.feeds.add(replica)
        await until(lambda: bool(engine.requests))
        assert fed.feeds.names(replica) == ()


async def test_an_engine_that_came_back_is_asked_anew(
    engine: FakeEngine, publisher: Publisher, second: Publisher
) -> None:
    """As after `kvgate engine run`, whose sockets lie in a folder of each run."""
    publisher.lose(stored(A))
    second.lose(stored(B))
    engine.on_get("/kv_event_sources", answering(saying(publisher)))
    replica = replica_at(engine.url)
    async with feeding("auto") as fed:
        fed.feeds.add(replica)
        await fed.holds(A, replica.name)
        engine.on_get("/kv_event_sources", answering(saying(second)))
        asked = len(engine.requests)
        replica.up = False
        fed.feeds.wake(replica)
        await until(lambda: fed.feeds._followed[replica].sources is None)
        replica.up = True
        fed.feeds.wake(replica)
        await fed.holds(B, replica.name)
        assert len(engine.requests) == asked + 1
        assert fed.routed(A, replica.name) == 0


async def test_rubbish_instead_of_an_answer_is_said_once(
    engine: FakeEngine, publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    publisher.lose(stored(A))
    engine.on_get("/kv_event_sources", answering(b"[7", 200))
    replica = replica_at(engine.url)
    async with feeding("auto") as fed:
        fed.feeds.add(replica)
        for n in range(1, 4):
            await until(lambda n=n: len(engine.requests) >= n)  # type: ignore[misc]
            fed.feeds.wake(replica)
        assert len([record for record in caplog.records if "/kv_event_sources" in record.message]) == 1
        engine.on_get("/kv_event_sources", answering(saying(publisher)))
        fed.feeds.wake(replica)
        await fed.holds(A, replica.name)
