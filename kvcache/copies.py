"""What one replica holds of one block: copies, by KV group and by tier.

An engine announces each physical copy: vLLM does not merge equal blocks, and a block may be on the GPU and offloaded at once.
States are few, so they are shared tuples, and a change is a look-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

GPU, CPU, STORAGE = "GPU", "CPU", "STORAGE"
TIERS = (GPU, CPU, STORAGE)  # the fastest first; any other name counts as the slowest

Lane = tuple[int, str]  # KV group, tier
Copies = tuple[tuple[Lane, int], ...]  # sorted, each count at least 1

NONE: Copies = ()
PLAIN: Copies = (((0, GPU), 1),)  # nearly every block


@dataclass(frozen=True, slots=True)
class Group:
    """A KV cache group, as the engine's events describe it.

    `full`: a hit needs every block of the prefix; `window`: the blocks of the last `window` tokens; `state`: the last block
    (Mamba). `block_size` in tokens.
    """

    index: int = 0
    kind: Literal["full", "window", "state"] = "full"
    block_size: int = 0
    window: int = 0

    @property
    def tail(self) -> int:
        """Blocks that must be there in front of the point from which a hit goes on; 0: all."""
        if self.kind == "full":
            return 0
        return max(1, -(-(self.window - 1) // self.block_size)) if self.kind == "window" and self.block_size else 1


@lru_cache(maxsize=4096)
def added(copies: Copies, lane: Lane) -> Copies:
    """With one more copy in the lane."""
    counts = dict(copies)
    counts[lane] = counts.get(lane, 0) + 1
    return tuple(sorted(counts.items()))


@lru_cache(maxsize=4096)
def removed(copies: Copies, lane: Lane) -> Copies | None:
    """With one copy fewer in the lane; None if there is none."""
    counts = dict(copies)
    if lane not in counts:
        return None
    counts[lane] -= 1
    return tuple(sorted((a, n) for a, n in counts.items() if n))


@lru_cache(maxsize=4096)
def single(copies: Copies) -> Copies:
    """With one copy in each lane that has any."""
    return tuple((lane, 1) for lane, _ in copies)


@lru_cache(maxsize=4096)
def total(copies: Copies) -> int:
    return sum(count for _, count in copies)


@lru_cache(maxsize=4096)
def groups(copies: Copies) -> frozenset[int]:
    return frozenset(group for (group, _), _ in copies)


@lru_cache(maxsize=4096)
def tier(copies: Copies) -> str:
    """The fastest tier that holds the block; the GPU for what is only expected."""
    found = {name for (_, name), _ in copies}
    return next((name for name in TIERS if name in found), min(found, default=GPU))
