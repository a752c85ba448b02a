"""Blocks that requests under way will have made: between a decision and the events that confirm it.

A request's blocks are expected from dispatch until the engine announces them, the request fails, or its deadline passes. They
count in a match, so that twins go where the first one went, and `PrefixIndex.in_flight` tells them from stored ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count

from kvcache.index import PrefixIndex
from kvcache.replica import Replica
from kvcache.tree import Node

FEW = 64  # tickets that are over may wait for their deadlines in any case


class Ticket:
    """One request's blocks on one replica. `stored` of them, the first ones, were held when the ticket met them."""

    __slots__ = ("block_size", "deadline", "namespace", "nodes", "open", "replica", "stored")

    def __init__(self, replica: Replica, namespace: Hashable, block_size: int, deadline: float) -> None:
        self.replica = replica
        self.namespace = namespace
        self.block_size = block_size
        self.deadline = deadline
        self.nodes: list[Node] = []
        self.stored = 0
        self.open = True  # False: cancelled, timed out, or it cannot grow any more

    @property
    def over(self) -> bool:
        """Nothing is expected for its sake any more."""
        return not self.open and not self.nodes


class Expected:
    """The tickets of one index. A big prompt may be given in pieces, so that no piece stalls the caller."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self._due: list[tuple[float, int, Ticket]] = []
        self._cancelled = 0  # since those that are over were last put away
        self._order = count()

    @property
    def tickets(self) -> int:
        """Kept: not many more than those for which something is expected."""
        return len(self._due)

    def begin(self, replica: str, block_size: int, deadline: float, namespace: Hashable = None) -> Ticket:
        """A request was sent to the replica. `deadline` is on the same clock as `age`'s now."""
        ticket = Ticket(self.index.replicas[replica], namespace, block_size, deadline)
        heappush(self._due, (deadline, next(self._order), ticket))
        return ticket

    def extend(self, ticket: Ticket, blocks: Sequence[bytes], now: float = 0.0) -> None:
        """The prompt's next full blocks. Ignored once the replica was cleared or the ticket is over."""
        index, replica = self.index, ticket.replica
        if not ticket.open or index.replicas.get(replica.name) is not replica:
            return
        space = max(0, replica.limit - len(replica.pending))
        index.make_room(min(len(blocks), space), now)
        if replica.block_size not in (0, ticket.block_size) or len(blocks) > space:
            ticket.open = False
            blocks = blocks[:space] if replica.block_size in (0, ticket.block_size) else ()
        node = ticket.nodes[-1] if ticket.nodes else index.root(ticket.namespace, ticket.block_size)
        if node is None or (ticket.nodes and node.parent is None):
            ticket.open = False
            return
        root = node
        for key in blocks:
            if not key:
                ticket.open = False
                break
            node = index.forest.place(node, key)
            claims = replica.pending.get(node)
            if claims is not None:
                replica.pending[node] = (*claims, ticket)
            elif not node.held & replica.bit:
                replica.pending[node] = (ticket,)
                index.forest.hold(node, replica.bit)
            elif ticket.stored == len(ticket.nodes):
                ticket.stored += 1
            ticket.nodes.append(node)
        index.forest.discard(root)

    def cancel(self, ticket: Ticket, now: float = 0.0) -> None:
        """The request failed, or its blocks have been announced: nothing more is expected for its sake."""
        self._lapse(ticket, now)
        self._cancelled += 1
        if self._cancelled > FEW + len(self._due) // 2:  # deadlines are far off, and requests many
            self._due = [entry for entry in self._due if not entry[2].over]
            heapify(self._due)
            self._cancelled = 0

    def _lapse(self, ticket: Ticket, now: float) -> None:
        ticket.open = False
        replica = ticket.replica
        if self.index.replicas.get(replica.name) is replica:
            for node in ticket.nodes:
                claims = replica.pending.get(node)
                if claims is None or ticket not in claims:
                    continue
                left = tuple(claim for claim in claims if claim is not ticket)
                if left:
                    replica.pending[node] = left
                else:
                    del replica.pending[node]
                    self.index.lapse(replica, node, now)
        ticket.nodes = []

    def age(self, now: float) -> int:
        """Cancel what is past its deadline; how many."""
        gone = 0
        while self._due and self._due[0][0] <= now:
            ticket = heappop(self._due)[2]
            if not ticket.over:
                self._lapse(ticket, now)
                gone += 1
        return gone
