"""Which folder each served name's prompts are made from, and which names share blocks: the ledger's shelf."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcache.spelling import Namespace
from server.ledger.shelf import Shelf, Speller
from tests.llm.toys import write_folder

Models = dict[str, dict[str, Any]]


def served(root: Path, *names: str, **adapters: str) -> Models:
    """An engine's /v1/models. `adapters`: by name, the base of each."""
    bases = {name: {"id": name, "root": str(root), "parent": None} for name in names}
    return bases | {name: {"id": name, "root": "/lora", "parent": base} for name, base in adapters.items()}


class Opened:
    """A shelf, and word of each model that it opens."""

    def __init__(self) -> None:
        self.count = 0
        self._news = asyncio.Event()
        self.shelf = Shelf({}, self._ready)

    def _ready(self) -> None:
        self.count += 1
        self._news.set()

    async def learn(self, models: Mapping[str, Mapping[str, Any]]) -> Speller:
        """The engine's speller, once there is one."""
        self.shelf.learn(models)
        async with asyncio.timeout(10):
            while (speller := self.shelf.speller(models)) is None:
                self._news.clear()
                await self._news.wait()
        return speller

    def namespace(self, name: str) -> Namespace:
        known = self.shelf.of(name)
        assert known is not None
        space = known.speller.namespace(known.lora, None)
        assert isinstance(space, Namespace)
        return space


@asynccontextmanager
async def opened() -> AsyncIterator[Opened]:
    made = Opened()
    try:
        yield made
    finally:
        await made.shelf.stop()


async def test_two_names_of_one_engine_share_their_blocks(tmp_path: Path) -> None:
    async with opened() as o:
        await o.learn(served(write_folder(tmp_path / "m"), "one", "two", style="one"))
        assert o.namespace("one") == o.namespace("two") == Namespace(None, None, "one")
        assert o.namespace("style") == Namespace("style", None, "one")
        assert o.count == 1


async def test_an_engine_with_one_of_these_names_is_asked_by_that(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    async with opened() as o:
        await o.learn(served(folder, "one", "two"))
        alone = await o.learn(served(folder, "two"))
        assert (alone.name, alone.namespace(None, None)) == ("two", o.namespace("one"))


async def test_models_of_other_folders_are_apart(tmp_path: Path) -> None:
    async with opened() as o:
        await o.learn(served(write_folder(tmp_path / "a"), "one"))
        await o.learn(served(write_folder(tmp_path / "b"), "two"))
        assert o.namespace("one") != o.namespace("two")


async def test_what_is_distrusted_is_so_under_all_its_names(tmp_path: Path) -> None:
    models = served(write_folder(tmp_path / "m"), "one", "two")
    async with opened() as o:
        o.shelf.distrust(await o.learn(models))
        o.shelf.learn(models)
        assert (o.shelf.of("one"), o.shelf.of("two"), o.shelf.speller(models)) == (None, None, None)


async def test_engines_that_name_other_folders_are_not_complained_of_forever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as o:
        with caplog.at_level(logging.WARNING, "kvgate"):
            for _ in range(3):
                for folder in ("here", "there"):
                    o.shelf.learn(served(tmp_path / folder, "one"))
            await asyncio.gather(*o.shelf._tasks)
        assert len(caplog.records) == 2
        assert "--tokenizer" in o.shelf.why_not(served(tmp_path / "here", "one"))
