"""Which blocks a request gets: vLLM 0.32's v1/core/kv_cache_manager.py for one KV group of full attention."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.sim.blocks import Block, BlockPool, Stored
from loadtest.sim.hashing import extra_keys
from loadtest.sim.request import Request


class KvCache:
    """A pool of `block_count` blocks of `block_size` tokens. enabled False is --no-enable-prefix-caching."""

    def __init__(self, block_count: int, block_size: int, max_model_len: int, *, enabled: bool = True) -> None:
        self.pool = BlockPool(block_count)
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.enabled = enabled

    def looks_up(self, request: Request) -> bool:
        return self.enabled and request.read_cache

    def hit(self, request: Request) -> list[Block]:
        """The longest cached prefix in whole blocks. The last token is always computed, for its logits."""
        found: list[Block] = []
        if self.looks_up(request):
            for block_hash in request.hashes[: (len(request.tokens) - 1) // self.block_size]:
                block = self.pool.find(block_hash)
                if block is None:
                    break
                found.append(block)
        return found

    def allocate(self, request: Request, new_tokens: int, hit: Sequence[Block] = (), *, whole: bool = False) -> bool:
        """Room for `new_tokens` more, after the blocks of a hit. False, and nothing done, where the pool cannot give it.

        whole: the whole sequence so far must fit, not only these tokens (vLLM's scheduler_reserve_full_isl).
        """
        total = len(request.tokens)
        computed = min(request.computed + len(hit) * self.block_size, self.max_model_len)
        if whole and self._needed(request, min(total, self.max_model_len), hit) > self.pool.free_count:
            return False
        slots = min(computed + new_tokens, self.max_model_len)
        if self._needed(request, slots, hit) > self.pool.free_count:
            return False
        if hit:
            self.pool.touch(hit)
            request.blocks.extend(hit)
            request.hashed = len(hit)
        missing = -(-slots // self.block_size) - len(request.blocks)
        if missing > 0:
            request.blocks.extend(self.pool.take(missing))
        self._store(request, min(computed + new_tokens, total))
        return True

    def free(self, request: Request) -> None:
        """Let go of the request's blocks, its tail to be reused first."""
        self.pool.release(reversed(request.blocks))
        request.blocks = []
        request.hashed = 0

    def _needed(self, request: Request, tokens: int, hit: Sequence[Block]) -> int:
        """Free blocks that this takes away: new ones, and hit ones that nobody holds."""
        new = max(-(-tokens // self.block_size) - len(hit) - len(request.blocks), 0)
        return new + sum(block.refs == 0 for block in hit)

    def _store(self, request: Request, tokens: int) -> None:
        """Blocks that are full with `tokens` tokens can be hit from now on: before they are computed, as in vLLM."""
        first, end = request.hashed, tokens // self.block_size
        if not self.enabled or first >= end:
            return
        stored = Stored(
            hashes=tuple(request.hashes[first:end]),
            parent=request.hashes[first - 1] if first else None,
            tokens=tuple(request.tokens[first * self.block_size : end * self.block_size]),
            block_size=self.block_size,
            keys=tuple(extra_keys(index, request.lora, request.salt) for index in range(first, end)),
            lora=request.lora,
            session=request.session,
        )
        self.pool.store(request.blocks[first:end], stored)
        request.hashed = end
