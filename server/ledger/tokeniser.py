"""Works on prompts off the event loop: tokenises them, one after the other, for what needs the borders of blocks nobody has
announced, and renders those that would hold up other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvcache.spelling import packed, packed_blocks, text_blocks
from llm.model import Model
from llm.prompt import Prompt
from server.ledger.faults import Faults

WAITING_BYTES = 32 * 1024 * 1024  # of prompts; what comes on top is left out, and seen when the engine announces it
LARGEST_BYTES = 2 * 1024 * 1024  # of one prompt, half a million tokens: tokenising takes 110 times the memory
WAITING_REQUESTS = 64  # for their own prompt; who comes on top goes by load
PATIENCE_SECONDS = 2.0  # that one waits for it, whatever others have sent; then it goes by load

Result = TypeVar("Result")


class Tokeniser:
    """Two threads: requests that wait for their prompt do not wait for the blocks of others. `left_out` counts prompts that were
    not tokenised because they are too large or too much waited, and requests that did not wait. Not to be used after `stop`."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._later = ThreadPoolExecutor(1, "kvgate-tokenise")
        self._soon = ThreadPoolExecutor(1, "kvgate-render")
        self._waiting = self._hurried = 0
        self.left_out = 0

    async def blocks(self, model: Model, prompt: Prompt, block_size: int) -> tuple[int, list[bytes]] | None:
        """The number of the prompt's tokens, and its full blocks. None where it is too large, too much waits, or it cannot be."""
        size = _size(prompt)
        if size > LARGEST_BYTES or self._waiting + size > WAITING_BYTES:
            self.left_out += 1
            return None
        self._waiting += size
        try:
            return await self._run(self._later, lambda: _blocks(model, prompt, block_size))
        finally:
            self._waiting -= size

    async def packed(self, model: Model, prompt: Prompt) -> tuple[bytes, int] | None:
        """The prompt as its ids, and their number; None where it is too large, or cannot be. A request waits for it."""
        if _size(prompt) > LARGEST_BYTES:
            self.left_out += 1
            return None

        def work() -> tuple[bytes, int]:
            ids = model.tokens(prompt)
            return packed(ids), len(ids)

        return await self.soon(work)

    async def soon(self, work: Callable[[], Result]) -> Result | None:
        """The result, of anything that a request waits for; None where it raised, too many wait, or it takes too long."""
        if self._hurried >= WAITING_REQUESTS:
            self.left_out += 1
            return None
        self._hurried += 1
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await self._run(self._soon, work)
        except TimeoutError:  # what has not begun never will
            self.left_out += 1
            return None
        finally:
            self._hurried -= 1

    async def _run(self, thread: ThreadPoolExecutor, work: Callable[[], Result]) -> Result | None:
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, work)
        except Exception:  # noqa: BLE001 - told by `note`
            self._faults.note("reading a prompt")
            return None

    def stop(self) -> None:
        for thread in (self._later, self._soon):
            thread.shutdown(wait=False, cancel_futures=True)


def _size(prompt: Prompt) -> int:
    """Bytes; of ids, four for each."""
    text = prompt.text
    if text is None:
        return 4 * len(prompt.ids or ())
    return len(text) if text.isascii() or len(text) > LARGEST_BYTES else len(text.encode())


def _blocks(model: Model, prompt: Prompt, block_size: int) -> tuple[int, list[bytes]]:
    ids = model.tokens(prompt)
    if model.by_bytes:
        return len(ids), text_blocks(model.tokenizer.token_bytes(ids), block_size)
    return len(ids), packed_blocks(ids, block_size)
