"""The KV events of every replica: each is followed from when it is added until it is dropped.

One replica may be several engines of a data-parallel server, each with a cache of its own: they are entries of their own in the
index, the first under the replica's name and the others under `name#rank`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
import zmq

from kvcache.copies import GPU
from kvcache.index import PrefixIndex
from server.bodies import read_whole
from server.ledger.feed import Feed, Speller
from server.ledger.pace import Pace
from server.ledger.sources import PATH, EventSources, Ranks, Unreachable, told_by_engine
from server.ledger.subscriber import Patience, Stream
from server.ledger.zmq_sockets import Context
from server.metrics import GatewayMetrics
from server.replica import Replica

logger = logging.getLogger("kvgate")

LOOK_SECONDS = 1.0  # between two looks at a replica that nobody spoke of
ASK_AGAIN_SECONDS = 5.0  # an engine whose events are not heard, for their address
HINT_SECONDS = 20.0  # without a connection, until a person is told what may be wrong
UNKNOWN_BLOCKS = 65_536  # that a replica is granted until it says how many it has
REPLAYS_AT_ONCE = 4
ANSWER_BYTES = 64 * 1024


@dataclass(slots=True)
class _Rank:
    """One engine process that is followed."""

    stream: Stream
    feed: Feed
    task: asyncio.Task[None]
    began: float  # loop time, seconds
    hinted: bool = False


@dataclass(slots=True, eq=False)
class _Followed:
    """One replica."""

    replica: Replica
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    ranks: dict[int, _Rank] = field(default_factory=dict)
    shown: bool = False  # in the metrics
    sources: Ranks | None = None  # None: not known since it last came up
    asked_at: float = 0.0
    complained: str = ""


class EventFeeds:
    """Feeds the index. Begins to follow a replica once it is up and its speller is known; nothing is lost by that as far as the
    engine replays. `speller_for` is asked now and then, and another speller than before begins the replica anew.

    on_change: called with the replica after a batch of its events was applied, when it becomes certain or uncertain, and
    when its `names` change. An entry of the index with one of these names is fed here alone. on_restart: called when events
    show that the replica's process (or that of one of its ranks) is another one.
    """

    def __init__(
        self,
        index: PrefixIndex,
        speller_for: Callable[[Replica], Speller | None],
        on_change: Callable[[Replica], None],
        sources: EventSources,
        metrics: GatewayMetrics,
        patience: Patience | None = None,
        on_restart: Callable[[Replica], None] = lambda replica: None,
    ) -> None:
        self.index = index
        self._speller_for = speller_for
        self._on_change = on_change
        self._on_restart = on_restart
        self._sources = sources
        self._metrics = metrics
        self._patience = patience
        self._followed: dict[Replica, _Followed] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._context: Context = zmq.Context()
        self._pace = Pace()
        self._replays = asyncio.Semaphore(REPLAYS_AT_ONCE)
        self._session: aiohttp.ClientSession | None = None

    # -- what the ledger calls

    def add(self, replica: Replica) -> None:
        """Follow this replica's events, if it has any."""
        followed = self._followed[replica] = _Followed(replica)
        followed.task = asyncio.create_task(self._follow(followed))

    def drop(self, replica: Replica) -> None:
        """The replica is gone: its entries and its metrics go with it."""
        followed = self._followed.pop(replica, None)
        if followed is not None:
            assert followed.task is not None
            self._end(followed.task)
            self._leave(followed)
            self._metrics.kv_event_gaps.remove(replica.name)

    def wake(self, replica: Replica) -> None:
        """Its speller is known now, or it came up."""
        if replica in self._followed:
            self._followed[replica].wake.set()

    def names(self, replica: Replica) -> tuple[str, ...]:
        """The entries of the index that its events feed, by rank; none where it has no events."""
        followed = self._followed.get(replica)
        return tuple(rank.feed.name for rank in followed.ranks.values()) if followed is not None else ()

    def cached_ratio(self, replica: Replica) -> float:
        """Blocks on the GPU that hold a reusable prefix / all blocks, of all ranks. Call it for replicas with `names` only."""
        feeds = [rank.feed for rank in self._followed[replica].ranks.values()]
        held = sum(self.index.held(feed.name, GPU) for feed in feeds)
        return min(1.0, held / sum(feed.blocks for feed in feeds))

    async def stop(self) -> None:
        """Ends every stream. The index is left as it is."""
        tasks = set(self._ending)
        for followed in self._followed.values():
            tasks.update(rank.task for rank in followed.ranks.values())
            if followed.task is not None:
                tasks.add(followed.task)
        self._followed.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        self._context.destroy(linger=0)

    # -- one replica

    async def _follow(self, followed: _Followed) -> None:
        while True:
            followed.wake.clear()
            try:
                await self._look(followed)
            except Exception:  # a fault in one look must not end the feed for good; it is logged whole
                logger.exception("the KV events of %s could not be looked after", followed.replica.name)
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await followed.wake.wait()
            except TimeoutError:
                continue

    async def _look(self, followed: _Followed) -> None:
        replica = followed.replica
        if not replica.up:
            followed.sources = None  # it may come back as another process, at other addresses
            return
        speller = self._speller_for(replica)
        if speller is None:
            return
        now = asyncio.get_running_loop().time()
        deaf = [rank for rank in followed.ranks.values() if not rank.stream.connected and not rank.task.done()]
        if followed.sources is None or (deaf and now - followed.asked_at >= ASK_AGAIN_SECONDS):
            followed.asked_at = now
            sources = await self._find(followed)
            if sources is None:
                return
            followed.sources = sources
        self._settle(followed, followed.sources, speller)
        for rank in deaf:
            if not (rank.hinted or rank.stream.was_connected) and now - rank.began >= HINT_SECONDS:
                rank.hinted = True
                logger.warning(
                    "no connection to the KV events of %s at %s: vLLM binds tcp://*:PORT, and a firewall must let it through",
                    rank.feed.name,
                    rank.stream.endpoint.publish,
                )

    async def _find(self, followed: _Followed) -> Ranks | None:
        """Its endpoints; None where they cannot be told now."""
        replica = followed.replica
        stated = self._sources.of(replica.url)
        if stated is not None:
            return stated
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0))
        try:
            async with self._session.get(f"{replica.url}{PATH}", allow_redirects=False) as response:
                if response.status == 404:
                    return {}
                if response.status != 200:
                    raise ValueError(f"{PATH} answered {response.status}")
                ranks = told_by_engine(await read_whole(response, ANSWER_BYTES), replica.url)
        except Unreachable as error:
            self._complain(followed, str(error))
            return {}
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self._complain(followed, f"{PATH}: {error or 'no answer in time'}")
            return None
        followed.complained = ""
        return ranks

    def _complain(self, followed: _Followed, why: str) -> None:
        if followed.complained != why:
            followed.complained = why
            logger.warning("KV events of %s: %s", followed.replica.name, why)

    def _settle(self, followed: _Followed, sources: Ranks, speller: Speller) -> None:
        """Have exactly one stream for each endpoint."""
        wanted = dict(sorted(sources.items()))
        running = {number: rank.stream.endpoint for number, rank in followed.ranks.items() if not rank.task.done()}
        if running != wanted or any(rank.feed.speller is not speller for rank in followed.ranks.values()):
            self._leave(followed)
            self._begin(followed, wanted, speller)
        blocks = self._blocks(followed)
        for rank in followed.ranks.values():
            if rank.feed.blocks != blocks:
                rank.feed.resize(blocks)
        if followed.ranks and followed.replica.kv_blocks and not followed.shown:
            followed.shown = True
            replica = followed.replica
            self._metrics.kv_cached.labels(replica.name).set_function(lambda: self.cached_ratio(replica))

    def _begin(self, followed: _Followed, sources: Ranks, speller: Speller) -> None:
        replica = followed.replica
        if not sources:
            return
        blocks = self._blocks(followed, len(sources))
        gaps = self._metrics.kv_event_gaps.labels(replica.name)
        for number, endpoint in sources.items():
            name = replica.name if not followed.ranks else f"{replica.name}#{number}"
            feed = Feed(self.index, name, blocks, speller, lambda: self._on_change(replica))
            feed.clear()  # whatever was inferred until now
            stream = Stream(
                endpoint,
                feed,
                self._context,
                self._pace,
                self._replays,
                gaps.inc,
                self._patience,
                lambda: self._on_restart(replica),
            )
            task = asyncio.create_task(stream.run())
            task.add_done_callback(lambda task: self._ended(task, followed))
            followed.ranks[number] = _Rank(stream, feed, task, asyncio.get_running_loop().time())
            logger.info("%s: KV events from %s", name, endpoint.publish)
        self._on_change(replica)

    def _leave(self, followed: _Followed) -> None:
        """End its streams and forget what it holds."""
        if not followed.ranks:
            return
        for rank in followed.ranks.values():
            self._end(rank.task)
            self.index.drop(rank.feed.name)
        followed.ranks.clear()
        if followed.shown:
            followed.shown = False
            self._metrics.kv_cached.remove(followed.replica.name)
        self._on_change(followed.replica)

    def _blocks(self, followed: _Followed, ranks: int = 0) -> int:
        """KV blocks of each rank: the engine tells the sum."""
        total = followed.replica.kv_blocks
        return max(1, total // (ranks or max(1, len(followed.ranks)))) if total else UNKNOWN_BLOCKS

    def _end(self, task: asyncio.Task[None]) -> None:
        """Cancel it, and keep it until it has ended: it has sockets to close."""
        if not task.done():
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _ended(self, task: asyncio.Task[None], followed: _Followed) -> None:
        """A stream ends by itself only through a fault; the next look begins it anew."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the KV events of %s are not followed any more", followed.replica.name, exc_info=error)
