"""Tokenises prompts off the request path, one after the other, for what needs the borders of blocks nobody has announced."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvcache.spelling import packed_blocks, text_blocks
from llm.model import Model
from llm.prompt import Prompt

logger = logging.getLogger("kvgate")

WAITING_BYTES = 32 * 1024 * 1024  # of prompts; what comes on top is left out, and seen when the engine announces it

Result = TypeVar("Result")


class Tokeniser:
    """One thread. `left_out` counts prompts that were not tokenised because too much waited. Not to be used after `stop`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "kvgate-tokenise")
        self._waiting = 0
        self.left_out = 0

    async def blocks(self, model: Model, prompt: Prompt, block_size: int) -> tuple[int, list[bytes]] | None:
        """The number of the prompt's tokens, and its full blocks. None where too much waits, or it cannot be tokenised."""
        return await self._run(prompt, lambda: _blocks(model, prompt, block_size))

    async def tokens(self, model: Model, prompt: Prompt) -> Sequence[int] | None:
        """The prompt's ids; None as above."""
        return await self._run(prompt, lambda: model.tokens(prompt))

    async def _run(self, prompt: Prompt, work: Callable[[], Result]) -> Result | None:
        size = len(prompt.text) if prompt.text is not None else 4 * len(prompt.ids or ())
        if self._waiting + size > WAITING_BYTES:
            self.left_out += 1
            return None
        self._waiting += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except Exception:  # whatever the tokenizers library raises: the request goes on without
            logger.exception("a prompt could not be tokenised")
            return None
        finally:
            self._waiting -= size

    def stop(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _blocks(model: Model, prompt: Prompt, block_size: int) -> tuple[int, list[bytes]]:
    ids = model.tokens(prompt)
    if model.by_bytes:
        return len(ids), text_blocks(model.tokenizer.token_bytes(ids), block_size)
    return len(ids), packed_blocks(ids, block_size)
