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
        if not self.looks_up(request):
            return []
        return self.pool.find_prefix(request.hashes[: (len(request.tokens) - 1) // self.block_size])

    def allocate(self, request: Request, new_tokens: int, hit: Sequence[Block] = (), *, whole: bool = False) -> bool:
        """Room for `new_tokens` more, after the blocks of a hit. False, and nothing done, where the pool cannot give it.

        whole: the whole sequence so far must fit, not only these tokens (vLLM's scheduler_reserve_full_isl).
        """
        total = len(request.tokens)
        computed = min(request.computed + len(hit) * self.block_size, self.max_model_len)
        slots = min(computed + new_tokens, self.max_model_len)
        room = self.pool.free_count - sum([block.refs == 0 for block in hit])  # to hit a free block takes it, too
        held = len(hit) + len(request.blocks)
        if whole and self._blocks(min(total, self.max_model_len)) - held > room:
            return False
        missing = max(self._blocks(slots) - held, 0)
        if missing > room:
            return False
        if hit:
            self.pool.touch(hit)
            request.blocks.extend(hit)
            request.hashed = len(hit)
        request.blocks.extend(self.pool.take(missing))
        self._store(request, min(computed + new_tokens, total))
        return True

    def free(self, request: Request) -> None:
        """Let go of the request's blocks, its tail to be reused first."""
        self.pool.release(reversed(request.blocks))
        request.blocks = []
        request.hashed = 0

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _store(self, request: Request, tokens: int) -> None:
        """Blocks that are full with `tokens` tokens can be hit from now on: before they are computed, as in vLLM."""
        first, end = request.hashed, tokens // self.block_size
        if not self.enabled or first >= end:
            return
        stored = Stored(
            hashes=tuple(request.hashes[first:end]),
            parent=request.hashes[first - 1] if first else None,
            tokens=request.tokens[first * self.block_size : end * self.block_size],
            block_size=self.block_size,
            keys=(extra_keys(first, request.lora, request.salt),)
            + (extra_keys(1, request.lora, None),) * (end - first - 1),
            lora=request.lora,
            session=request.session,
        )
        self.pool.store(request.blocks[first:end], stored)
        request.hashed = end
