"""What an engine without KV events holds, inferred from what was sent to it and what it said it delivered.

Least recently used blocks go first, a request's last blocks before its first ones, as in vLLM's own order of freeing. How many
fit is the engine's capacity at first; a delivery that falls short of the prediction says that blocks go earlier than thought
(answers take room too, and so do other clients), and one that does not lets the estimate grow again.
"""

from __future__ import annotations

from kvcache.expected import Expected, Ticket
from kvcache.match import usable
from kvcache.replica import Replica

MAX_AGE = 1200.0  # s; blocks unused for longer are not trusted
SHRINK, GROW = 0.9, 1.02
SMALLEST = 16  # blocks


class Inferred:
    """For the replicas of one index that send no events. A request gets its ticket from `expected`, and ends here."""

    def __init__(self, expected: Expected, max_age: float = MAX_AGE) -> None:
        self.expected = expected
        self.index = expected.index
        self.max_age = max_age
        self._room: dict[str, tuple[int, float]] = {}  # capacity, estimate, in blocks

    def add(self, replica: str, blocks: int) -> None:
        """The replica has so many KV blocks."""
        self.index.add(replica, blocks)
        estimate = self._room.get(replica, (0, float(blocks)))[1]
        self._room[replica] = (blocks, min(estimate, float(blocks)))

    def drop(self, replica: str, now: float = 0.0) -> None:
        self._room.pop(replica, None)
        self.index.drop(replica, now)

    def knows(self, replica: str) -> bool:
        """Whether what it holds is inferred."""
        return replica in self._room

    def release(self, replica: str) -> None:
        """It sends events after all: what it holds is not inferred any more."""
        self._room.pop(replica, None)

    def room(self, replica: str) -> float:
        """How many blocks the replica is thought to keep."""
        return self._room[replica][1]

    def finish(self, ticket: Ticket, prompt_tokens: int, delivered: int | None, now: float) -> None:
        """The engine has prefilled the prompt, and delivered so many of its tokens from its cache; None: it did not say."""
        index, replica = self.index, ticket.replica
        if index.replicas.get(replica.name) is not replica or replica.name not in self._room:
            self.expected.cancel(ticket, now)
            return
        if delivered is not None:
            self._correct(replica, ticket, prompt_tokens, delivered)
        for node in reversed(ticket.nodes):
            if node in replica.inferred:
                replica.inferred[node] = now
                replica.inferred.move_to_end(node)
            elif node.parent is not None and not replica.of(node):
                replica.pending.pop(node, None)
                replica.inferred[node] = now
                index.forest.hold(node, replica.bit)
        self.expected.cancel(ticket, now)
        self._fit(replica, now)

    def age(self, now: float) -> None:
        """Let go of blocks that were not used for `max_age` seconds."""
        for name in self._room:
            replica = self.index.replicas[name]
            while replica.inferred and next(iter(replica.inferred.values())) < now - self.max_age:
                self._let_go(replica, now)

    def _correct(self, replica: Replica, ticket: Ticket, prompt_tokens: int, delivered: int) -> None:
        capacity, estimate = self._room[replica.name]
        predicted = usable(ticket.stored * ticket.block_size, prompt_tokens, ticket.block_size)
        if delivered < predicted:  # what went before its turn shows that as many blocks as are kept now did not fit
            estimate = min(estimate, float(len(replica.inferred))) * SHRINK
        elif delivered or predicted:
            estimate *= GROW
        self._room[replica.name] = (capacity, min(float(capacity), max(estimate, float(SMALLEST))))

    def _fit(self, replica: Replica, now: float) -> None:
        room = min(self._room[replica.name][1], replica.limit)
        while len(replica.inferred) > room:
            self._let_go(replica, now)

    def _let_go(self, replica: Replica, now: float) -> None:
        node, _ = replica.inferred.popitem(last=False)
        self.index.lapse(replica, node, now)
