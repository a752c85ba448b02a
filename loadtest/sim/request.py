"""A request as the scheduler sees it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal

from loadtest.sim.blocks import Block
from loadtest.sim.hashing import TOKEN, Algorithm, BlockHash, Chain, Lora, sha256_chain

Finish = Literal["stop", "length", "abort"]


class Request:
    """Its tokens, the blocks it holds and how far it has been computed.

    max_tokens: output tokens after which it ends, at least 1. eos: a token that ends it. read_cache False computes the
    whole prompt (prompt_logprobs), though the blocks are still stored. hashing: how blocks are keyed.
    """

    __slots__ = (
        "_hashing",
        "block_size",
        "blocks",
        "cached_tokens",
        "computed",
        "created_tokens",
        "eos",
        "finish",
        "hashed",
        "hashes",
        "id",
        "lora",
        "max_tokens",
        "preemptions",
        "prompt_count",
        "read_cache",
        "salt",
        "session",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        block_size: int,
        *,
        salt: str | None = None,
        lora: Lora | None = None,
        eos: int | None = None,
        read_cache: bool = True,
        session: str | None = None,
        hashing: Algorithm = sha256_chain,
    ) -> None:
        self.id = request_id
        self.tokens = array(TOKEN, prompt)
        self.prompt_count = len(prompt)
        self.max_tokens = max_tokens
        self.block_size = block_size
        self.salt = salt
        self.lora = lora
        self.eos = eos
        self.read_cache = read_cache
        self.session = session
        self._hashing = hashing
        self.hashes: list[BlockHash] = []
        self.blocks: list[Block] = []
        self.hashed = 0  # of these blocks, those that can be hit
        self.computed = 0  # tokens whose keys and values exist, counting the step in flight
        self.cached_tokens = 0  # prompt tokens hit at the first admission
        self.created_tokens = 0  # prompt tokens that this request added to the cache
        self.preemptions = 0
        self.finish: Finish | None = None
        self._hash_full_blocks()

    @property
    def output_count(self) -> int:
        return len(self.tokens) - self.prompt_count

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if len(self.tokens) % self.block_size == 0:
            self._hash_full_blocks()

    def _hash_full_blocks(self) -> None:
        first = len(self.hashes)
        chain = Chain(self.block_size, first, self.hashes[-1] if first else None, self.lora, self.salt)
        self.hashes += self._hashing(chain, self.tokens[first * self.block_size :])
