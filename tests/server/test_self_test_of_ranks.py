"""The self-test of a data-parallel server: the probe may come to any of its engines, each with a cache of its own."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvcache.match import Match, usable
from llm.model import Model, open_model
from server.ledger.selftest import SelfTest
from tests.llm.toys import write_folder

BLOCK = 16


class Server(SelfTest):
    """Of so many engines, which take requests in turn and cache them, or not."""

    def __init__(
        self, session: aiohttp.ClientSession, model: Model, engines: int, *, caches: bool, events: bool
    ) -> None:
        super().__init__(session, "http://127.0.0.1:9", "m", model, BLOCK, self._held, events)
        self._made = model
        self._caches = caches
        self._turns = itertools.cycle(range(engines))
        self._known: set[tuple[int, str]] = set()
        self.requests = 0

    async def _held(self, fields: dict[str, Any]) -> Match:
        tokens = len(self._made.tokenizer.encode(fields["prompt"], True)) // BLOCK * BLOCK
        return Match({"m": tokens}, tokens)

    async def _compare_prompts(self) -> str:
        return ""

    async def _complete(self, fields: dict[str, Any]) -> tuple[int, int | None]:
        self.requests += 1
        count = len(self._made.tokenizer.encode(fields["prompt"], True))
        here = (next(self._turns), fields["prompt"])
        hit = usable(count, count, BLOCK) if here in self._known else 0
        if self._caches:
            self._known.add(here)
        return count, hit


@pytest.mark.parametrize("events", [True, False])
@pytest.mark.parametrize("engines", [1, 2, 4])
async def test_it_passes_though_the_probe_comes_to_others_in_between(
    tmp_path: Path, engines: int, events: bool
) -> None:
    async with aiohttp.ClientSession() as session:
        server = Server(session, open_model(write_folder(tmp_path)), engines, caches=True, events=events)
        verdict = await server.run()
    assert verdict.problem == ""
    assert verdict.delivered is not None
    assert verdict.delivered >= 3 * BLOCK
    assert server.requests == 1 + engines


@pytest.mark.parametrize("events", [True, False])
async def test_one_that_caches_nothing_is_told_so_in_the_end(tmp_path: Path, events: bool) -> None:
    async with aiohttp.ClientSession() as session:
        server = Server(session, open_model(write_folder(tmp_path)), 2, caches=False, events=events)
        assert "is prefix caching switched off?" in (await server.run()).problem
