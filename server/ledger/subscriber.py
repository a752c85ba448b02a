"""Follows the KV events of one engine (one data-parallel rank of it) without missing any, or says that some are missing.

Live batches are numbered; the engine keeps the last ones (10,000 by default) and sends them again when asked. Replays are asked
for from the last batch that is known, that one included: if it comes back unchanged, nothing is lost and it is the same process;
if it is another, or there is none, the engine has begun anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from math import inf, isinf

from zmq.utils.monitor import parse_monitor_message

from server.ledger import wire
from server.ledger.feed import Feed
from server.ledger.pace import Pace
from server.ledger.sequence import Sequence, Verdict
from server.ledger.sources import Endpoint
from server.ledger.zmq_sockets import (
    CLOSED,
    CONNECT,
    CONNECTED,
    DISCONNECTED,
    RETRY,
    Context,
    Socket,
    live_socket,
    readable,
    received,
    replay_socket,
)

logger = logging.getLogger("kvgate")

MESSAGES = 64  # taken between two pauses, if they cost nothing


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds, unless it says otherwise. An idle engine looks for a request to replay ten times a second."""

    silence: float = 3.0  # of a replay, until it counts as unanswered
    cool_down: float = 30.0  # after an unanswered one
    idle: float = 3.0  # without an event, until the last one is asked for, in case that later ones were lost
    tries: int = 3  # replays in a row that bring nothing new, or that an idle engine does not answer


def _events(monitor: Socket) -> set[int]:
    """What happened to a socket's connection since the last call."""
    found = set()
    while (frames := received(monitor)) is not None:
        found.add(int(parse_monitor_message(frames)["event"]))
    return found


class Outcome(Enum):
    COMPLETE = auto()
    HOLE = auto()  # the engine's queue overflowed: ask for the rest
    RESTARTED = auto()
    SILENT = auto()


class Stream:
    """One engine's events, from its endpoint into a feed. `replays` bounds those under way in this process.

    on_gap: called for each run of missing batches, whether a replay brings them or not. on_restart: called when the engine's
    process is seen to be another one.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        feed: Feed,
        context: Context,
        pace: Pace,
        replays: asyncio.Semaphore,
        on_gap: Callable[[], None] = lambda: None,
        patience: Patience | None = None,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        self.endpoint = endpoint
        self.feed = feed
        self.connected = self.was_connected = False
        self._context = context
        self._pace = pace
        self._replays = replays
        self._on_gap = on_gap
        self._on_restart = on_restart
        self._patience = patience or Patience()
        self._sequence = Sequence()
        self._whole = False  # every batch from the first one on was taken
        self._owed = False  # a replay was not answered: what was missed may still be had
        self._look_at = inf  # loop time, seconds: when to ask what was missed
        self._idle = False  # nothing but silence is the reason to ask then
        self._unanswered = 0  # such questions, in a row
        self._silent_until = 0.0
        feed.doubt("its events are not known yet")

    async def run(self) -> None:
        """Until cancelled. Each connection has a socket of its own, so that nothing of an ended process mixes with the next."""
        pause = RETRY[0]
        while True:
            live = live_socket(self._context)
            monitor = live.get_monitor_socket(CONNECTED | DISCONNECTED | CLOSED)
            try:
                live.connect(self.endpoint.publish)
                if await self._connects(monitor):
                    pause = RETRY[0]
                    await self._follow(live, monitor)
            finally:
                self.connected = False
                live.disable_monitor()
                monitor.close(0)
                live.close(0)
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY[1])

    async def _connects(self, monitor: Socket) -> bool:
        until = self._now() + CONNECT
        while self._now() < until:
            events = _events(monitor)
            if events:
                return events == {CONNECTED}
            await readable((monitor,), until - self._now())
        return False

    async def _follow(self, live: Socket, monitor: Socket) -> None:
        """Until the connection is gone."""
        if self.was_connected and self.endpoint.replay is None:
            self._lose()  # nobody can tell what was published in between
        self.connected = self.was_connected = True
        # What was published in between is missing, or all that was published; and another process may answer now
        self._look_at, self._idle, self._silent_until = self._now(), False, 0.0
        while DISCONNECTED not in _events(monitor):
            if self._now() >= self._look_at:
                await self._catch_up(idle=self._idle)
            await self._drain(live)
            left = self._look_at - self._now()
            await readable((live, monitor), None if isinf(left) else left)
        while (frames := received(live)) is not None and await self._hear_last(frames):
            continue

    # -- live

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _drain(self, live: Socket) -> None:
        for _ in range(MESSAGES):
            frames = received(live)
            if frames is None:
                return
            await self._hear(frames)
        await asyncio.sleep(0)

    async def _hear(self, frames: list[bytes]) -> None:
        try:
            numbered = wire.numbered(frames)
        except wire.BrokenFrame as error:
            self.feed.broke(str(error))
            return
        if numbered is None:
            self.feed.broke("a batch without content")
            return
        number, payload = numbered
        verdict = self._sequence.verdict(number, payload)
        if verdict is Verdict.SEEN:
            return
        if verdict is not Verdict.NEXT and await self._resolve(number, payload, verdict):
            return
        await self._take(number, payload)
        if number == 0:
            self.feed.trust()

    async def _hear_last(self, frames: list[bytes]) -> bool:
        """What had come before the connection went: taken while it is in order, as another process may replay by now."""
        try:
            numbered = wire.numbered(frames)
        except wire.BrokenFrame:
            return False
        if numbered is None or self._sequence.verdict(*numbered) is not Verdict.NEXT:
            return numbered is not None and self._sequence.verdict(*numbered) is Verdict.SEEN
        await self._take(*numbered)
        return True

    async def _resolve(self, number: int, payload: bytes, verdict: Verdict) -> bool:
        """A batch that does not follow the last one: asks for what is between. Whether nothing is left to do for it: it came
        with the answer, or is of a process that has ended since."""
        counted = verdict is Verdict.GAP and self._sequence.last is not None
        if counted:
            self._on_gap()
        complete = await self._catch_up(counted)
        if verdict is not Verdict.GAP:
            if not complete:
                self._start_over()
            elif self._sequence.verdict(number, payload) in (Verdict.OLD, Verdict.RESTARTED):
                return True  # the engine has just told that its batches are other ones
        verdict = self._sequence.verdict(number, payload)
        if verdict not in (Verdict.NEXT, Verdict.SEEN):
            self._lose()
        return verdict is Verdict.SEEN

    async def _take(self, number: int, payload: bytes) -> None:
        if number == 0:
            self._whole = True
        self._sequence.take(number, payload)
        if self.endpoint.replay is not None and not self._owed:
            self._look_when_idle()
        await self._pace.work(self.feed.apply(payload))

    def _look_when_idle(self) -> None:
        self._look_at, self._idle = self._now() + self._patience.idle, True

    def _lose(self) -> None:
        """Batches are missing, and will not come."""
        self._whole = False
        self.feed.doubt("events were lost" if self._sequence.last is not None else "its earlier events are not known")

    def _start_over(self) -> None:
        """The engine's process is another one, which holds nothing of what the old one held."""
        logger.info("%s publishes its KV events anew", self.feed.name)
        self._sequence.reset()
        self._whole = False
        self.feed.clear()
        self.feed.doubt("it restarted")
        self._on_restart()

    # -- replays

    async def _catch_up(self, counted: bool = False, idle: bool = False) -> bool:
        """Asks for what was missed, until nothing is missing or there is no more to be had. `counted`: as a gap. `idle`:
        nothing is known to be missing, so the engine may be too busy to answer, a few times. Whether the engine has told all
        that it can."""
        if self.endpoint.replay is None:
            self._look_at = inf
            return False
        if self._now() < self._silent_until:
            self._look_at = self._silent_until
            return False
        async with self._replays:
            fruitless = 0
            while fruitless < self._patience.tries:
                before = self._sequence.last
                outcome = await self._replay(self.endpoint.replay, counted)
                if outcome is Outcome.COMPLETE:
                    if self._whole:
                        self.feed.trust()
                    self._owed = False
                    self._unanswered = 0
                    self._look_when_idle()
                    return True
                if outcome is Outcome.SILENT:
                    self._unanswered += 1
                    if idle and self._unanswered < self._patience.tries:
                        self._look_when_idle()
                        return False
                    break
                if outcome is Outcome.RESTARTED:
                    self._start_over()
                new = outcome is Outcome.HOLE and before != self._sequence.last
                fruitless = 0 if new else fruitless + 1
        self._owed = True
        self._whole = False
        self.feed.doubt("it does not replay its events")
        self._unanswered = 0
        self._idle = False
        self._silent_until = self._look_at = self._now() + self._patience.cool_down
        return False

    async def _replay(self, address: str, counted: bool) -> Outcome:
        """One request, and what comes back. Replies to earlier ones never mix in: each has a socket of its own."""
        sequence = self._sequence
        everything = self._owed or sequence.last is None
        dealer = replay_socket(self._context)
        try:
            dealer.connect(address)
            start = 0 if everything else max(0, sequence.last or 0)
            dealer.send_multipart([b"", start.to_bytes(8, "big")])
            first = True
            while (frames := await self._next_reply(dealer)) is not None:
                numbered = wire.numbered(frames)
                if numbered is None:
                    return self._replayed_none() if first else Outcome.COMPLETE
                number, payload = numbered
                if first and everything and number == 0 and sequence.last is not None:
                    self._owed = False
                    sequence.reset()  # it reaches back to the beginning: all that was lost is here
                    self.feed.clear()
                    self.feed.doubt("it is replayed from the start")
                verdict = sequence.verdict(number, payload)
                if verdict is Verdict.RESTARTED:
                    return Outcome.RESTARTED
                if verdict is Verdict.GAP:
                    if not first:
                        return Outcome.HOLE
                    if sequence.last is not None and not counted:
                        self._on_gap()
                    self._lose()
                if verdict in (Verdict.NEXT, Verdict.GAP):
                    await self._take(number, payload)
                first = False
            return Outcome.SILENT if first else Outcome.HOLE  # the engine's queue may have overflowed with the end
        except wire.BrokenFrame as error:
            self.feed.broke(str(error))
            return Outcome.HOLE
        finally:
            dealer.close(0)

    def _replayed_none(self) -> Outcome:
        """The engine keeps nothing from the number on that was asked for."""
        last = self._sequence.last
        if last is None:
            self._sequence.begin()
            self._whole = True
        return Outcome.COMPLETE if last is None or last < 0 else Outcome.RESTARTED

    async def _next_reply(self, dealer: Socket) -> list[bytes] | None:
        """None after a silence."""
        until = self._now() + self._patience.silence
        while (frames := received(dealer)) is None:
            if self._now() >= until:
                return None
            await readable((dealer,), until - self._now())
        return frames
