"""The pool of KV blocks and the order in which they are reused: vLLM 0.32's v1/core/block_pool.py for one KV group.

A block is free when no request holds it. Free blocks that hold a prefix can still be hit; they are taken for new tokens
from the head of the free queue, and that is when what they held is evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loadtest.sim.hashing import BlockHash, Key, Lora


@dataclass(slots=True, eq=False)
class Block:
    number: int
    refs: int = 0
    hash: BlockHash | None = None  # set while the block is full and can be hit


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that can be hit from now on: neighbours in one request's chain."""

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    tokens: tuple[int, ...]
    block_size: int
    keys: tuple[tuple[Key, ...] | None, ...]  # one entry per block
    lora: Lora | None = None
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """A block was evicted. Another with the same hash may still exist."""

    hash: BlockHash


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing can be hit any more."""


Event = Stored | Removed | Cleared


class BlockPool:
    """`count` blocks; number 0 is the null block, which nobody gets."""

    def __init__(self, count: int) -> None:
        if count < 2:
            raise ValueError("a pool needs the null block and at least one other")
        self.blocks = [Block(number) for number in range(count)]
        self.events: list[Event] = []
        self._free: OrderedDict[int, Block] = OrderedDict((block.number, block) for block in self.blocks[1:])
        # copies of one block are not merged; the oldest copy is the one that is hit
        self._cached: dict[BlockHash, list[Block]] = {}

    @property
    def usable(self) -> int:
        return len(self.blocks) - 1

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def cached_count(self) -> int:
        """Blocks that can be hit, copies included."""
        return sum(map(len, self._cached.values()))

    @property
    def usage(self) -> float:
        """The share of blocks that requests hold, 0 to 1. A cached block that nobody holds counts as free."""
        return 1.0 - self.free_count / self.usable

    def free_order(self) -> list[Block]:
        """Free blocks, the next to be reused first."""
        return list(self._free.values())

    def find(self, block_hash: BlockHash) -> Block | None:
        copies = self._cached.get(block_hash)
        return copies[0] if copies else None

    def take(self, count: int) -> list[Block]:
        """`count` blocks from the head of the free queue; what they held is evicted. The caller has checked free_count."""
        taken = [self._free.popitem(last=False)[1] for _ in range(count)]
        for block in taken:
            if block.hash is not None:
                self._evict(block, block.hash)
            block.refs = 1
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """A request holds these blocks too, after a hit."""
        for block in blocks:
            if block.refs == 0:
                del self._free[block.number]
            block.refs += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """A request lets go of its blocks, the first to be reused first: a chain comes tail first.

        Blocks that hold no prefix go to the head of the queue, the others to its tail.
        """
        unhashed: list[Block] = []
        hashed: list[Block] = []
        for block in blocks:
            block.refs -= 1
            if block.refs == 0:
                (unhashed if block.hash is None else hashed).append(block)
        for block in reversed(unhashed):
            self._free[block.number] = block
            self._free.move_to_end(block.number, last=False)
        for block in hashed:
            self._free[block.number] = block

    def store(self, blocks: Sequence[Block], stored: Stored) -> None:
        """Full blocks of a request can be hit from now on, under stored.hashes."""
        for block, block_hash in zip(blocks, stored.hashes, strict=True):
            assert block.hash is None
            block.hash = block_hash
            self._cached.setdefault(block_hash, []).append(block)
        self.events.append(stored)

    def reset(self) -> bool:
        """Forget every prefix. False, and nothing done, while any block is held."""
        if self.free_count != self.usable:
            return False
        self._cached.clear()
        for block in self.blocks:
            block.hash = None
        self.events.append(Cleared())
        return True

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def _evict(self, block: Block, block_hash: BlockHash) -> None:
        copies = self._cached[block_hash]
        copies.remove(block)
        if not copies:
            del self._cached[block_hash]
        block.hash = None
        self.events.append(Removed(block_hash))
