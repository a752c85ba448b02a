"""pytest tests/engine/test_kv_events.py: what the index says from the engine's events is what the engine then delivers."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

from prometheus_client import CollectorRegistry

from kvcache.index import PrefixIndex
from kvcache.match import usable
from kvcache.spelling import Namespace, packed
from server.engines.launch import RunningEngine
from server.exchange.upstream import EnginePool
from server.ledger.feeds import EventFeeds
from server.ledger.sources import EventSources
from server.metrics import GatewayMetrics
from server.replica import EngineUrl, Replica
from server.watch import kv_shape
from tests.server.ledger.following import until
from tests.server.ledger.spelling import PackedSpeller

BLOCK = 32
Prompt = tuple[list[int], str | None]  # token ids, salt


def post(url: str, body: dict[str, object] | None = None) -> dict[str, object]:
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, object] = json.load(answer)
    return found


async def delivered(engine: RunningEngine, prompt: Prompt) -> int:
    """Tokens of the prompt that came from the cache."""
    tokens, salt = prompt
    body: dict[str, object] = {"model": engine.model, "prompt": tokens, "max_tokens": 1, "temperature": 0}
    if salt is not None:
        body["cache_salt"] = salt
    answer = await asyncio.to_thread(post, f"{engine.url}/v1/completions", body)
    usage = answer["usage"]
    assert isinstance(usage, dict)
    return int(usage["prompt_tokens_details"]["cached_tokens"])


class Fed:
    """An index that follows the engine."""

    def __init__(self, engine: RunningEngine) -> None:
        self.engine = engine
        self.index = PrefixIndex()
        url = EngineUrl.parse(engine.url)
        self.replica = Replica(url, EnginePool(url.host, url.port, tls=False), up=True)
        with urllib.request.urlopen(engine.metrics_url, timeout=30) as answer:
            page = b"\n" + answer.read()
        self.replica.kv_blocks, self.replica.block_size = kv_shape(page)
        self.speller = PackedSpeller()
        self.feeds = EventFeeds(
            self.index,
            lambda replica: self.speller,
            lambda replica: None,
            EventSources.parse("auto"),
            GatewayMetrics(CollectorRegistry()),
        )

    @property
    def name(self) -> str:
        return self.replica.name

    @property
    def held(self) -> int:
        return self.index.held(self.name)

    def routed(self, prompt: Prompt) -> int:
        tokens, salt = prompt
        return self.index.match(packed(tokens), Namespace(salt=salt)).routed(self.name)

    def predicted(self, prompt: Prompt) -> int:
        return usable(self.routed(prompt), len(prompt[0]), BLOCK)

    async def knows(self, prompt: Prompt) -> None:
        """Returns when all blocks of the prompt are held."""
        await until(lambda: self.routed(prompt) == len(prompt[0]) // BLOCK * BLOCK)

    async def sent(self, prompt: Prompt) -> tuple[int, int]:
        """Sends it; what was predicted and what was delivered, in tokens."""
        predicted = self.predicted(prompt)
        found = await delivered(self.engine, prompt)
        await self.knows(prompt)
        return predicted, found


@asynccontextmanager
async def following(engine: RunningEngine) -> AsyncIterator[Fed]:
    fed = Fed(engine)
    fed.feeds.add(fed.replica)
    try:
        await until(lambda: fed.feeds.names(fed.replica) != () and not fed.index.uncertain(fed.name))
        yield fed
    finally:
        await fed.feeds.stop()


def prompts(count: int, salts: tuple[str | None, ...] = (None,), longest: int = 400) -> list[Prompt]:
    """Of a few families with shared beginnings, that nobody has sent before."""
    rng = random.Random(uuid4().int)
    heads = [[rng.randrange(100, 40_000) for _ in range(longest)] for _ in range(3)]
    made: list[Prompt] = []
    for _ in range(count):
        head = rng.choice(heads)[: rng.choice((BLOCK, 2 * BLOCK + 1, 5 * BLOCK - 1, 8 * BLOCK, longest))]
        tail = [rng.randrange(100, 40_000) for _ in range(rng.choice((0, 1, BLOCK - 1, BLOCK, 70)))]
        made.append(([*head, *tail], rng.choice(salts)))
    return made


async def test_the_engine_says_how_large_its_cache_is(engine: RunningEngine) -> None:
    fed = Fed(engine)
    assert fed.replica.block_size == BLOCK
    assert fed.replica.kv_blocks is not None
    assert fed.replica.kv_blocks * BLOCK >= 8 * 3_100
    await fed.feeds.stop()


async def test_what_the_index_says_is_delivered(engine: RunningEngine) -> None:
    async with following(engine) as fed:
        asked = prompts(30, salts=(None, None, "salt-a", "salt-b"))
        answered = [await fed.sent(prompt) for prompt in asked]
        assert [predicted for predicted, _ in answered] == [found for _, found in answered]
        assert sum(found for _, found in answered) > 20 * BLOCK, "the prompts share beginnings"
        assert fed.feeds.cached_ratio(fed.replica) > 0


async def test_who_joins_late_knows_the_same(engine: RunningEngine) -> None:
    async with following(engine) as first:
        asked = prompts(8, salts=(None, "salt-c"))
        for prompt in asked:
            await first.sent(prompt)
        async with following(engine) as late:
            await until(lambda: late.held == first.held)
            assert [late.routed(prompt) for prompt in asked] == [first.routed(prompt) for prompt in asked]


async def test_a_cache_that_overflows_is_followed(engine: RunningEngine) -> None:
    """More prompts than it holds, eight at a time; then each of them once more, one by one."""
    async with following(engine) as fed:
        assert fed.replica.kv_blocks is not None
        rng = random.Random(uuid4().int)
        length, count = 1000, fed.replica.kv_blocks * BLOCK // 1000 + 8  # longer ones would take longer to compute
        asked: list[Prompt] = [([rng.randrange(100, 40_000) for _ in range(length)], None) for _ in range(count)]
        turns = asyncio.Semaphore(8)

        async def send(prompt: Prompt) -> int:
            async with turns:
                return await delivered(engine, prompt)

        assert await asyncio.gather(*(send(prompt) for prompt in asked)) == [0] * count
        await fed.knows(asked[-1])
        assert 0.9 < fed.feeds.cached_ratio(fed.replica) <= 1.0
        held = [fed.predicted(prompt) for prompt in asked]
        assert 0 in held, "the first ones were evicted"
        kept = [prompt for prompt, tokens in zip(asked, held, strict=True) if tokens]
        for prompt in reversed(kept[-4:]):
            predicted, found = await fed.sent(prompt)
            assert predicted == found > 0
        predicted, found = await fed.sent(asked[held.index(0)])
        assert predicted == found == 0
        assert not fed.index.uncertain(fed.name)


async def test_a_cache_that_is_cleared_is_empty(engine: RunningEngine) -> None:
    async with following(engine) as fed:
        asked = prompts(3)
        for prompt in asked:
            await fed.sent(prompt)
        assert await asyncio.to_thread(post, f"{engine.url}/reset_prefix_cache") == {"success": True}
        (other,) = prompts(1)
        await delivered(engine, other)  # the engine tells with its next step
        await fed.knows(other)
        assert fed.held == len(other[0]) // BLOCK
        for prompt in asked:
            predicted, found = await fed.sent(prompt)
            assert predicted == found
        assert fed.predicted(asked[0]) > 0
