"""A stream that follows a publisher, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import zmq

from kvcache.index import PrefixIndex
from kvcache.spelling import packed
from server.ledger.feed import Feed
from server.ledger.pace import Pace
from server.ledger.sources import Endpoint
from server.ledger.subscriber import Patience, Stream
from server.ledger.zmq_sockets import Context
from tests.server.ledger.publisher import Publisher
from tests.server.ledger.spelling import PLAIN, PackedSpeller

# Long enough that only a test which waits for it on purpose ever sees it
NEVER = 3600.0
PATIENT = Patience(silence=NEVER, cool_down=NEVER, idle=NEVER)


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


class Follower:
    """`gaps`, `restarts`: how many were found."""

    def __init__(self, blocks: int) -> None:
        self.index = PrefixIndex()
        self.feed = Feed(self.index, "r", blocks, PackedSpeller())
        self.gaps = self.restarts = 0
        self.pace = Pace()
        self.stream: Stream

    def routed(self, tokens: list[int]) -> int:
        return self.index.match(packed(tokens), PLAIN).routed("r")

    async def holds(self, tokens: list[int], count: int | None = None) -> None:
        """Returns when so many tokens of the prompt, or all, are held."""
        await until(lambda: self.routed(tokens) == (len(tokens) if count is None else count))

    async def certain(self) -> None:
        await until(lambda: not self.uncertain)

    @property
    def uncertain(self) -> bool:
        return self.index.uncertain("r")

    def _gap(self) -> None:
        self.gaps += 1

    def _restart(self) -> None:
        self.restarts += 1


@asynccontextmanager
async def following(
    publisher: Publisher, *, replay: bool = True, patience: Patience = PATIENT, blocks: int = 10_000
) -> AsyncIterator[Follower]:
    follower = Follower(blocks)
    endpoint = Endpoint(publisher.address, publisher.replay_address if replay else None)
    context: Context = zmq.Context()
    follower.stream = Stream(
        endpoint,
        follower.feed,
        context,
        follower.pace,
        asyncio.Semaphore(1),
        follower._gap,
        patience,
        follower._restart,
    )
    task = asyncio.create_task(follower.stream.run())
    try:
        yield follower
        assert not task.done(), task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)
