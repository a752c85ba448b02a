"""What a match says, and the arithmetic between a hit and what an engine can deliver of it. All numbers are tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd

from kvcache.tree import End

Ends = tuple[int, list[End]]  # block size in tokens, and what a walk through the tree of that size gave


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix of one prompt that each replica holds, without a hole, in whole blocks.

    `tokens` has the replicas that hold at least one block; blocks that a request under way will have made are counted in it
    (see `PrefixIndex.in_flight`). `available` is the largest. Not cut to what a prompt of n tokens can hit: see `usable`.
    """

    tokens: Mapping[str, int]
    available: int
    ends: tuple[Ends, ...] = field(default=(), repr=False)

    def routed(self, replica: str) -> int:
        """Tokens that this replica holds."""
        return self.tokens.get(replica, 0)


NOTHING = Match({}, 0)


@dataclass(frozen=True, slots=True)
class Remembered:
    """The longest prefix the index has ever known and not forgotten, held or not; `since` is when the last holder of its
    first block that nobody holds let go of it (the caller's clock; None: all of it is held)."""

    tokens: int
    since: float | None


def reusable(prompt_tokens: int, granularity: int, dropped: int = 0) -> int:
    """The most tokens of a prompt that any cache can deliver: whole blocks, and never the last token.

    `granularity`: the block size, or on hybrid models what hits are a multiple of. `dropped`: blocks the engine computes
    again in any case (1 with EAGLE or MTP).
    """
    if prompt_tokens < 1:
        return 0
    return max(0, (prompt_tokens - 1) // granularity - dropped) * granularity


def usable(held: int, prompt_tokens: int, granularity: int, dropped: int = 0) -> int:
    """What an engine that holds `held` tokens of the prompt delivers.

    EAGLE drops the last block of the hit itself, however long the prompt is.
    """
    hit = min(held, reusable(prompt_tokens, granularity)) // granularity
    return max(0, hit - dropped) * granularity


def floor(prompt_tokens: int, granularity: int, dropped: int = 0) -> int:
    """Tokens of a prompt that can never hit: the rest of the last block, the last token, dropped blocks."""
    return prompt_tokens - reusable(prompt_tokens, granularity, dropped)


class Granularity:
    """What an engine's hits are a multiple of, learnt from what it delivers, since events do not say it.

    The block size, until deliveries fall short of the prediction in a way that a coarser grain explains, `EVIDENCE` times
    in a row. A delivery that is not a multiple refines it at once.
    """

    EVIDENCE = 4

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tokens = block_size
        self._divisor = 0
        self._short = 0
        self._explained: set[int] = set()

    def observe(self, held: int, delivered: int) -> None:
        """One finished request: tokens that the replica held, in whole blocks, and tokens that it delivered."""
        if delivered and delivered % self.tokens:
            self.tokens = max(self.block_size, gcd(self.tokens, delivered))
        if not delivered or delivered % self.block_size:
            return
        divisor = gcd(self._divisor, delivered)
        if divisor > self.block_size and held // divisor * divisor == delivered:
            self._divisor = divisor
            if held > delivered:
                self._short += 1
                self._explained.add(held)
            if self._short >= self.EVIDENCE and len(self._explained) > 1:
                self.tokens = divisor
        else:
            self._divisor, self._short = 0, 0
            self._explained.clear()
