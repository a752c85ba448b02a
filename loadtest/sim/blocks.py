"""The pool of KV blocks and the order in which they are reused: vLLM 0.32's v1/core/block_pool.py for one KV group.

A block is free when no request holds it. Free blocks that hold a prefix can still be hit; they are taken for new tokens
from the head of the free queue, and that is when what they held is evicted.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

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
    tokens: array[int]
    block_size: int
    keys: tuple[tuple[Key, ...] | None, ...]  # one entry per block
    lora: Lora | None = None
    session: str | None = None


class Removed(msgspec.Struct, frozen=True, gc=False):  # one for each evicted block: a dataclass costs ten times as much
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
        self._free: OrderedDict[Block, None] = OrderedDict.fromkeys(self.blocks[1:])
        # copies of one block are not merged; the oldest copy is the one that is hit
        self._cached: dict[BlockHash, Block] = {}
        self._copies: dict[BlockHash, list[Block]] = {}  # the younger ones, by age

    @property
    def usable(self) -> int:
        return len(self.blocks) - 1

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def cached_count(self) -> int:
        """Blocks that can be hit, copies included."""
        return len(self._cached) + sum(map(len, self._copies.values()))

    @property
    def usage(self) -> float:
        """The share of blocks that requests hold, 0 to 1. A cached block that nobody holds counts as free."""
        return 1.0 - self.free_count / self.usable

    def free_order(self) -> list[Block]:
        """Free blocks, the next to be reused first."""
        return list(self._free)

    def find_prefix(self, hashes: Sequence[BlockHash]) -> list[Block]:
        """The blocks of the longest beginning of `hashes` that is cached."""
        find, found = self._cached.get, []
        for block_hash in hashes:
            block = find(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, count: int) -> list[Block]:
        """`count` blocks from the head of the free queue; what they held is evicted. The caller has checked free_count."""
        pop, taken = self._free.popitem, []
        for _ in range(count):
            block = pop(False)[0]
            if block.hash is not None:
                self._evict(block, block.hash)
            block.refs = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """A request holds these blocks too, after a hit."""
        for block in blocks:
            if block.refs == 0:
                del self._free[block]
            block.refs += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """A request lets go of its blocks, the first to be reused first: a chain comes tail first.

        Blocks that hold no prefix go to the head of the queue, the others to its tail.
        """
        free, unhashed = self._free, []
        for block in blocks:
            block.refs -= 1
            if block.refs == 0:
                if block.hash is None:
                    unhashed.append(block)
                else:
                    free[block] = None
        for block in reversed(unhashed):
            free[block] = None
            free.move_to_end(block, last=False)

    def store(self, blocks: Sequence[Block], stored: Stored) -> None:
        """Full blocks of a request can be hit from now on, under stored.hashes."""
        for block, block_hash in zip(blocks, stored.hashes, strict=True):
            assert block.hash is None
            block.hash = block_hash
            if self._cached.setdefault(block_hash, block) is not block:
                self._copies.setdefault(block_hash, []).append(block)
        self.events.append(stored)

    def reset(self) -> bool:
        """Forget every prefix. False, and nothing done, while any block is held."""
        if self.free_count != self.usable:
            return False
        self._cached.clear()
        self._copies.clear()
        for block in self.blocks:
            block.hash = None
        self.events.append(Cleared())
        return True

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def _evict(self, block: Block, block_hash: BlockHash) -> None:
        copies = self._copies.get(block_hash)
        if copies is None:
            del self._cached[block_hash]
        else:
            if self._cached[block_hash] is block:
                self._cached[block_hash] = copies.pop(0)
            else:
                copies.remove(block)
            if not copies:
                del self._copies[block_hash]
        block.hash = None
        self.events.append(Removed(block_hash))
