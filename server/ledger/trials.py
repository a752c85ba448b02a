"""When engines are tested: each once it is up, again when it came back or restarted, and while it delivers nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import aiohttp

from kvcache.match import Match
from server.ledger.faults import Faults
from server.ledger.selftest import SelfTest, Verdict
from server.ledger.shelf import Speller
from server.replica import Replica

logger = logging.getLogger("kvgate")

EVENTS_SECONDS = 3.0  # that an engine's events may take to be followed once it is up, before it is tested without them
TEST_SECONDS = 60.0  # for one request of the self-test: a busy engine lets it wait
AGAIN_SECONDS = 5.0  # until one that failed, or delivers nothing of what is expected, is tested again
DOUBLINGS = 6  # of it, at most, while it fails again and again

MatchOf = Callable[
    [Replica, Speller, dict[str, Any]], Awaitable[Match]
]  # what it holds of a completion with these fields


@dataclass(slots=True)
class _Tested:
    """Times are monotonic seconds. up_since: None while it is down. due: when it is to be tested; None: it was."""

    followed: bool = False  # its events are
    up_since: float | None = None
    due: float | None = None
    ended: float = 0.0
    running: asyncio.Task[None] | None = None
    failures: int = 0  # in a row
    told: str = ""  # what was wrong

    def stop(self) -> None:
        """A test under way says nothing of the process that answers now."""
        if self.running is not None:
            self.running.cancel()
            self.running = None


class Trials:
    """Self-tests of all replicas, one at a time of each. `recovered` is called when one that delivered nothing delivers again,
    `strange` with a speller that an engine's own prompts differ from."""

    def __init__(
        self,
        speller_for: Callable[[Replica], Speller | None],
        why_not: Callable[[Replica], str],
        match: MatchOf,
        recovered: Callable[[Replica], None],
        strange: Callable[[Speller], None],
        engine_headers: Mapping[str, str],
        faults: Faults,
    ) -> None:
        self._speller_for = speller_for
        self._why_not = why_not
        self._match = match
        self._recovered = recovered
        self._strange = strange
        self._headers = engine_headers
        self._faults = faults
        self._session: aiohttp.ClientSession | None = None
        self._tested: dict[Replica, _Tested] = {}

    def add(self, replica: Replica) -> None:
        self._tested[replica] = _Tested()

    def drop(self, replica: Replica) -> None:
        known = self._tested.pop(replica, None)
        if known is not None:
            known.stop()

    def follows(self, replica: Replica, followed: bool) -> None:
        """Whether its events are followed. Where they are at last, what was tested without them is tested with them."""
        known = self._tested[replica]
        if followed and not known.followed and known.up_since is not None:
            known.due = monotonic()
        known.followed = followed

    def followed(self, replica: Replica) -> bool:
        known = self._tested.get(replica)
        return known is not None and known.followed

    def anew(self, replica: Replica) -> None:
        """It came back, perhaps as another process."""
        known = self._tested[replica]
        known.stop()
        known.up_since = None
        known.failures = 0

    def look_after(self, now: float) -> None:
        """Begins the tests that are due."""
        for replica, known in self._tested.items():
            if not replica.up:
                known.stop()
                known.up_since = None
            elif self._is_due(replica, known, now):
                speller = self._speller_for(replica)
                if speller is None and replica.self_test is None and (why := self._why_not(replica)):
                    replica.self_test = Verdict(problem=why).report()
                patient = not known.followed and known.up_since is not None and now - known.up_since < EVENTS_SECONDS
                if speller is not None and replica.block_size is not None and not patient:
                    known.due = None
                    known.running = asyncio.create_task(self._run(replica, known, speller, replica.block_size))

    def _is_due(self, replica: Replica, known: _Tested, now: float) -> bool:
        if known.up_since is None:
            known.up_since = known.due = now
            replica.self_test = None
        if known.running is not None:
            return False
        if known.due is None and replica.prediction.missing:
            known.due = known.ended + AGAIN_SECONDS
        return known.due is not None and now >= known.due

    async def _run(self, replica: Replica, known: _Tested, speller: Speller, block_size: int) -> None:
        try:
            await self._test(replica, known, speller, block_size)
        except Exception:  # noqa: BLE001 - told by `note`
            self._faults.note("testing an engine")
        known.running = None
        known.ended = monotonic()

    async def _test(self, replica: Replica, known: _Tested, speller: Speller, block_size: int) -> None:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=TEST_SECONDS)
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)

        async def match(fields: dict[str, Any]) -> Match:
            return await self._match(replica, speller, fields)

        test = SelfTest(
            self._session, str(replica.url), speller.name, speller.model, block_size, match, events := known.followed
        )
        verdict = await test.run()
        replica.self_test = verdict.report()
        if verdict.problem:  # it may have been busy, or its events not connected to again so soon
            known.due = monotonic() + AGAIN_SECONDS * 2 ** min(known.failures, DOUBLINGS)
        known.failures = known.failures + 1 if verdict.problem else 0
        if verdict.strange:
            self._strange(speller)
        if verdict.delivered and not verdict.problem and replica.prediction.missing:
            self._recovered(replica)
        told, known.told = known.told, verdict.problem
        if verdict.problem:
            level = logging.DEBUG if verdict.problem == told else logging.WARNING
            logger.log(level, "self-test of %s: %s", replica.name, verdict.problem)
        elif events:
            logger.info(
                "self-test of %s: announced = predicted = delivered = %d tokens", replica.name, verdict.delivered
            )
        else:
            logger.info("self-test of %s: it delivers, and is inferred, having no KV events", replica.name)

    async def stop(self) -> None:
        running = [known.running for known in self._tested.values() if known.running is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
