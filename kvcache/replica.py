"""What the index knows of one replica: its bit, its blocks by the engine's own hashes, its KV groups, its counters."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from kvcache import copies
from kvcache.copies import NONE, PLAIN, Copies, Group
from kvcache.match import Granularity
from kvcache.tree import Node

Hash = int | bytes  # as the engine's events spell it


class Claim(Protocol):
    """Something that expects a block to appear: a dispatched request."""


@dataclass(slots=True)
class Counters:
    """Events that did not fit, since the replica was added or cleared: blocks, unless it says otherwise."""

    orphans: int = 0  # stored under a parent nobody told of
    unplaced: int = 0  # stored without bytes, and of a hash never seen: offload and window events do so
    strays: int = 0  # removed, but not held
    shed: int = 0  # dropped, since the replica claimed more blocks than it can have: removals got lost
    recounts: int = 0  # times that copies were counted anew for the same reason

    @property
    def doubtful(self) -> bool:
        return bool(self.orphans or self.shed or self.recounts)


@dataclass(slots=True, eq=False)
class Replica:
    """One replica, between two clears. `limit` bounds the copies it can claim, in blocks."""

    name: str
    bit: int
    limit: int
    block_size: int = 0  # tokens; 0 until the first block
    shadow: int = 0  # the bit of blocks that only some groups hold; 0 with one group
    nodes: dict[Hash, Node] = field(default_factory=dict)
    odd: dict[Node, Copies] = field(default_factory=dict)  # whatever is not PLAIN
    pending: dict[Node, tuple[Claim, ...]] = field(default_factory=dict)  # expected, and not held otherwise
    inferred: OrderedDict[Node, float] = field(default_factory=OrderedDict)  # without events: when last used
    groups: dict[int, Group] = field(default_factory=dict)
    tally: dict[str, int] = field(default_factory=dict)  # copies by tier
    counters: Counters = field(default_factory=Counters)
    doubted: bool = False  # somebody says that events are missing
    granularity: Granularity | None = None
    _complete: dict[Copies, bool] = field(default_factory=dict)

    def of(self, node: Node) -> Copies:
        """The copies it has of a block."""
        found = self.odd.get(node)
        if found is not None:
            return found
        return PLAIN if node.held & self.bit and node not in self.pending and node not in self.inferred else NONE

    @property
    def claimed(self) -> int:
        """Copies in all tiers."""
        return sum(self.tally.values())

    def uncount(self, held: Copies, left: Copies) -> None:
        """Copies went from `held` to `left`."""
        for (_, tier), n in held:
            self.tally[tier] -= n
        for (_, tier), n in left:
            self.tally[tier] += n

    def complete(self, held: Copies) -> bool:
        """Whether every group that needs all blocks of a prefix has this one."""
        answer = self._complete.get(held)
        if answer is None:
            answer = self._complete[held] = bool(held) and self._full() <= copies.groups(held)
        return answer

    def _full(self) -> frozenset[int]:
        full = frozenset(index for index, group in self.groups.items() if group.kind == "full")
        return full or frozenset([min(self.groups, default=0)])

    def learn(self, group: Group) -> None:
        self.groups[group.index] = group
        self._complete.clear()

    @property
    def partial(self) -> list[Group]:
        """The groups that need only the end of a prefix."""
        full = self._full()
        return [group for group in self.groups.values() if group.index not in full]

    def bits(self, node: Node, held: Copies) -> int:
        """The bits that the node should have of this replica."""
        reach = self.bit if self.complete(held) or node in self.pending or node in self.inferred else 0
        return reach | (self.shadow if held else 0)
