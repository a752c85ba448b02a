"""Following a publisher over real sockets: joins, gaps, replays that lose things, restarts, floods, rubbish."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.ledger.subscriber import Patience
from tests.server.ledger.following import NEVER, following, until
from tests.server.ledger.publisher import BLOCK, CLEARED, Event, Publisher, name_of, removed, stored

A = list(range(12))
B = list(range(100, 108))
C = list(range(200, 208))
# Where queues overflow anything may be lost, the end of a replay and the last batches, too
HASTY = Patience(silence=1.0, cool_down=0.1, idle=0.1)


@pytest.fixture(params=["ipc", "tcp"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Publisher]:
    made = Publisher(tmp_path, tcp=request.param == "tcp")
    yield made
    made.close()


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    made = Publisher(tmp_path)
    yield made
    made.close()


async def test_what_is_published_is_heard(anywhere: Publisher) -> None:
    async with following(anywhere) as follower:
        assert follower.uncertain, "nothing is known yet"
        await anywhere.joined()
        await follower.certain()
        anywhere.publish(stored(A))
        await follower.holds(A)
        anywhere.publish(removed(A, 2), arrays=True)
        await follower.holds(A, 8)
        assert (follower.gaps, anywhere.asked) == (0, [0])
        assert not follower.uncertain


async def test_who_joins_late_has_the_past_replayed(anywhere: Publisher) -> None:
    anywhere.lose(stored(A), stored(B))
    anywhere.lose(removed(A, 2))
    async with following(anywhere) as follower:
        await follower.holds(A, 8)
        await follower.certain()
        assert follower.routed(B) == 8
        assert follower.gaps == 0, "to join is no gap"


async def test_older_versions_replay_without_the_topic(publisher: Publisher) -> None:
    publisher.topics = False
    publisher.lose(stored(A))
    async with following(publisher) as follower:
        await follower.holds(A)
        await follower.certain()


async def test_a_gap_is_filled_in_order(anywhere: Publisher) -> None:
    async with following(anywhere) as follower:
        await anywhere.joined()
        anywhere.publish(stored(A))
        await follower.holds(A)
        anywhere.lose(stored(B))
        anywhere.lose(removed(B, 1))
        anywhere.publish(stored(B, first=1))
        await follower.holds(B)
        await follower.certain()
        assert follower.gaps == 1
        assert anywhere.asked[-1] == 0, "from the last batch that is known"
        assert follower.index.held("r") == 5, "no batch counted twice"


async def test_a_lost_tail_is_found_when_it_stays_quiet(publisher: Publisher) -> None:
    async with following(publisher, patience=Patience(idle=0.05)) as follower:
        await publisher.joined()
        publisher.publish(stored(A))
        await follower.holds(A)
        publisher.lose(stored(B))
        await follower.holds(B)
        assert not follower.uncertain


async def test_a_replay_that_loses_batches_is_asked_again(publisher: Publisher) -> None:
    for n in range(50):
        publisher.lose(stored([n] * BLOCK))
    publisher.holes = {7, 8, 30}
    async with following(publisher) as follower:
        await follower.certain()
        assert follower.index.held("r") == 50
        assert publisher.asked == [0, 6]


async def test_a_replay_that_reaches_back_too_little_leaves_it_uncertain(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, kept=2)
    try:
        for tokens in (A, B, C):
            publisher.lose(stored(tokens))
        async with following(publisher) as follower:
            await follower.holds(C)
            assert follower.routed(B) == 8
            assert follower.routed(A) == 0
            assert follower.uncertain
            await publisher.joined()
            publisher.publish(CLEARED, stored(A))
            await follower.holds(A)
            assert not follower.uncertain, "all is known of a cleared cache"
    finally:
        publisher.close()


async def test_a_gap_that_cannot_be_filled_leaves_it_uncertain(publisher: Publisher) -> None:
    async with following(publisher) as follower:
        await publisher.joined()
        publisher.publish(stored(A))
        await follower.holds(A)
        publisher.lose(stored(B))
        publisher.forget()
        publisher.publish(stored(C))
        await follower.holds(C)
        assert follower.uncertain
        assert follower.gaps == 1
        assert follower.routed(A) == 12, "what it held before is likely to be there"


async def test_without_replays_a_gap_leaves_it_uncertain(publisher: Publisher) -> None:
    async with following(publisher, replay=False) as follower:
        await publisher.joined()
        publisher.publish(stored(A))
        await follower.holds(A)
        await follower.certain()  # heard from its first batch on
        publisher.lose(stored(B))
        publisher.publish(stored(C))
        await follower.holds(C)
        assert follower.uncertain
        assert (follower.gaps, publisher.asked) == (1, [])


async def test_without_replays_who_joins_late_is_uncertain(publisher: Publisher) -> None:
    publisher.lose(stored(A))
    async with following(publisher, replay=False) as follower:
        await publisher.joined()
        publisher.publish(stored(B))
        await follower.holds(B)
        assert follower.uncertain
        assert follower.gaps == 0


async def test_replays_that_are_not_answered_are_made_up_for_later(publisher: Publisher) -> None:
    publisher.replaying = False
    publisher.lose(stored(A))
    async with following(publisher, patience=Patience(silence=0.05, cool_down=0.05, idle=NEVER)) as follower:
        await publisher.joined()
        publisher.publish(stored(B))
        await follower.holds(B)
        assert follower.uncertain
        publisher.replaying = True
        await follower.holds(A)
        await follower.certain()
        assert follower.routed(B) == 8
        assert follower.index.held("r") == 5


async def test_an_engine_too_busy_to_answer_for_a_while_is_not_doubted(publisher: Publisher) -> None:
    async with following(publisher, patience=Patience(silence=0.02, idle=0.02, tries=4)) as follower:
        await publisher.joined()
        publisher.publish(stored(A))
        await follower.holds(A)
        await follower.certain()
        publisher.replaying = False
        asked = len(publisher.asked)
        await until(lambda: len(publisher.asked) >= asked + 3)
        assert not follower.uncertain
        publisher.replaying = True
        publisher.lose(stored(B))
        await follower.holds(B)
        assert not follower.uncertain
        publisher.replaying = False
        await until(lambda: follower.uncertain)


async def test_a_new_connection_is_asked_at_once(publisher: Publisher) -> None:
    """However long the old one is not to be asked any more."""
    async with following(publisher, patience=Patience(silence=0.02, cool_down=NEVER, idle=0.02, tries=2)) as follower:
        await publisher.joined()
        publisher.publish(stored(A))
        await follower.holds(A)
        await follower.certain()
        publisher.replaying = False
        await until(lambda: follower.uncertain)
        publisher.shut()
        await until(lambda: not follower.stream.connected)
        publisher.restart()
        publisher.replaying = True
        publisher.open()
        await follower.holds(A, 0)
        await follower.certain()


# -- restarts


async def test_a_restart_is_noticed_by_its_first_batch(publisher: Publisher) -> None:
    async with following(publisher) as follower:
        await publisher.joined()
        publisher.publish(stored(A))
        publisher.publish(stored(B))
        await follower.holds(B)
        publisher.restart()
        publisher.publish(stored(C))
        await follower.holds(C)
        await follower.certain()
        assert follower.routed(A) == follower.routed(B) == 0
        assert follower.restarts == 1


async def test_a_restart_is_noticed_when_it_has_published_more_than_before(publisher: Publisher) -> None:
    """Nothing of it was heard until its numbers had passed the old ones."""
    async with following(publisher) as follower:
        await publisher.joined()
        publisher.publish(stored(A))
        publisher.publish(stored(B))
        await follower.holds(B)
        publisher.restart()
        for n in range(5):
            publisher.lose(stored([n] * BLOCK))
        publisher.publish(stored(C))
        await follower.holds(C)
        await follower.certain()
        assert follower.routed(A) == follower.routed(B) == 0
        assert follower.index.held("r") == 7


async def test_a_restart_is_noticed_before_it_publishes_anything(anywhere: Publisher) -> None:
    async with following(anywhere) as follower:
        await anywhere.joined()
        anywhere.publish(stored(A))
        await follower.holds(A)
        anywhere.shut()
        await until(lambda: not follower.stream.connected)
        anywhere.restart()
        anywhere.open()
        await follower.holds(A, 0)
        await follower.certain()
        assert follower.restarts == 1
        await anywhere.joined()
        anywhere.publish(stored(B))
        await follower.holds(B)


async def test_a_broken_connection_loses_nothing(anywhere: Publisher) -> None:
    async with following(anywhere) as follower:
        await anywhere.joined()
        anywhere.publish(stored(A))
        await follower.holds(A)
        anywhere.shut()
        await until(lambda: not follower.stream.connected)
        anywhere.lose(stored(B))
        anywhere.open()
        await follower.holds(B)
        await follower.certain()
        assert follower.routed(A) == 12, "it is the same process"
        assert follower.restarts == 0


async def test_a_connection_that_broke_without_replays_leaves_it_uncertain(publisher: Publisher) -> None:
    async with following(publisher, replay=False) as follower:
        await publisher.joined()
        publisher.publish(stored(A))
        await follower.certain()
        publisher.shut()
        publisher.open()
        await publisher.joined()
        await until(lambda: follower.uncertain)
        publisher.publish(stored(B))
        await follower.holds(B)
        assert follower.uncertain
        assert follower.routed(A) == 12


async def test_a_restart_without_replays_forgets_the_old_process(publisher: Publisher) -> None:
    async with following(publisher, replay=False) as follower:
        await publisher.joined()
        publisher.publish(stored(A))
        publisher.publish(stored(B))
        await follower.holds(B)
        publisher.restart()
        publisher.publish(stored(C))
        await follower.holds(C)
        assert follower.routed(A) == 0
        await follower.certain()
        publisher.publish(stored(A))
        await follower.holds(A)
        publisher.restart()
        publisher.lose(stored(A))
        publisher.publish(stored(B))
        await follower.holds(B)
        assert follower.routed(C) == 0
        assert follower.uncertain, "its first batch was not heard"


async def test_late_and_doubled_batches_change_nothing(publisher: Publisher) -> None:
    async with following(publisher) as follower:
        await publisher.joined()
        for tokens in (A, B):
            publisher.publish(stored(tokens))
        await follower.holds(B)
        for number in (1, 0, 0, 1):
            publisher.again(number)
        publisher.publish(stored(C))
        await follower.holds(C)
        assert follower.index.held("r") == 7
        assert follower.gaps == 0
        assert not follower.uncertain


async def test_batches_out_of_order_are_put_in_order(publisher: Publisher) -> None:
    async with following(publisher) as follower:
        await publisher.joined()
        publisher.publish(stored(A))
        await follower.holds(A)
        publisher.lose(stored(B))
        publisher.publish(removed(B, 1))
        publisher.again(1)
        publisher.publish(stored(C))
        await follower.holds(C)
        assert follower.routed(B) == 4
        assert not follower.uncertain


# -- rubbish and floods


async def test_rubbish_makes_uncertain_and_is_passed_over(publisher: Publisher) -> None:
    async with following(publisher) as follower:
        await publisher.joined()
        await follower.certain()
        publisher.send_frames(b"alone")
        await until(lambda: follower.feed.broken == 1)
        assert follower.uncertain
        publisher.send_frames(b"", b"short", b"x")
        publisher.send_frames(b"", b"\xff" * 8, b"")
        publisher.send(b"\xc1 is no message")
        publisher.publish("no event", {"type": "Unheard"}, stored(A))
        await follower.holds(A)
        assert follower.feed.broken == 5
        publisher.publish(CLEARED)
        await follower.certain()


async def test_a_flood_does_not_hold_up_the_loop(publisher: Publisher) -> None:
    """However much is waiting, other tasks run between any two turns."""
    for n in range(500):
        publisher.lose(*(stored([n, m, 0, 0]) for m in range(20)))
    async with following(publisher, patience=HASTY, blocks=30_000) as follower:
        turns = 0
        while follower.index.held("r") < 10_000:
            turns += 1
            await asyncio.sleep(0)
        await follower.certain()
        assert follower.pace.rests > 5
        assert turns > follower.pace.rests


async def test_more_than_waits_here_is_had_by_replay(publisher: Publisher) -> None:
    """A burst while nothing is taken: what the queues do not hold is lost, noticed and replayed."""
    async with following(publisher, patience=HASTY, blocks=30_000) as follower:
        await publisher.joined()
        await follower.certain()
        async with follower.pace._free:
            for n in range(9000):
                publisher.publish(stored([n, n, n, n]))
        await until(lambda: follower.index.held("r") == 9000)
        await follower.certain()


# -- everything at once


class Cache:
    """A cache that stores, removes and clears at random; `copies` by prefix."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.prompts = [[rng.randrange(3) for _ in range(16)] for _ in range(12)]
        self.copies: Counter[tuple[int, ...]] = Counter()

    def event(self) -> Event:
        tokens = self.rng.choice(self.prompts)
        held = [n for n in range(1, 5) if self.copies[tuple(tokens[: n * BLOCK])]]
        if self.rng.random() < 0.02:
            self.copies.clear()
            return CLEARED
        if held and self.rng.random() < 0.5:
            n = self.rng.choice(held)
            self.copies[tuple(tokens[: n * BLOCK])] -= 1
            return removed(tokens, n - 1)
        first = 0
        while first < 3 and self.copies[tuple(tokens[: (first + 1) * BLOCK])]:
            first += 1
        for n in range(first + 1, 5):
            self.copies[tuple(tokens[: n * BLOCK])] += 1
        return stored(tokens, first)

    def longest(self, tokens: list[int]) -> int:
        n = 0
        while n < 4 and self.copies[tuple(tokens[: (n + 1) * BLOCK])]:
            n += 1
        return n * BLOCK


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_is_lost_the_index_is_the_cache(publisher: Publisher, seed: int) -> None:
    rng = random.Random(seed)
    cache = Cache(rng)
    async with following(publisher, patience=HASTY) as follower:
        for _ in range(150):
            event = cache.event()
            action = rng.random()
            if action < 0.15:
                publisher.lose(event)
                publisher.holes.add(rng.randrange(publisher.number))
            elif action < 0.2 and publisher.number:
                publisher.publish(event, arrays=True)
                publisher.again(rng.randrange(publisher.number))
            elif action < 0.22:
                publisher.lose(event)
                publisher.shut()
                publisher.open()
            elif action < 0.24:
                publisher.shut()  # with a process its connections go
                publisher.restart()
                publisher.open()
                cache.copies.clear()
                publisher.publish(cache.event())
            else:
                publisher.publish(event, rank=None)
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        publisher.holes.clear()
        await publisher.joined()
        await until(lambda: follower.stream.connected)
        publisher.publish(stored([9] * 4, block_hashes=[name_of([seed])]))
        await follower.holds([9] * 4)
        await follower.certain()
        for tokens in cache.prompts:
            assert follower.routed(tokens) == cache.longest(tokens)
