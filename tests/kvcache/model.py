"""A dumb model of what replicas hold, and what must be true of an index whatever happened to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvcache import copies
from kvcache.index import PrefixIndex
from kvcache.tree import Node, Root

BLOCK = 2  # tokens
SPELLED = (b"a;", b"bb;", b"ccc;")  # the bytes of tokens 0, 1, 2: no text can be read in two ways

Tokens = tuple[int, ...]


def text(tokens: Sequence[int]) -> bytes:
    return b"".join(SPELLED[token] for token in tokens)


def blocks(tokens: Sequence[int]) -> list[bytes]:
    return [text(tokens[at : at + BLOCK]) for at in range(0, len(tokens) // BLOCK * BLOCK, BLOCK)]


def engine_hash(namespace: str | None, prefix: Tokens) -> int:
    return hash((namespace, prefix))


class Model:
    """Copies by namespace and prefix, one dict for each replica."""

    def __init__(self) -> None:
        self.replicas: dict[str, dict[tuple[str | None, Tokens], Counter[str]]] = {}
        self.orphans: Counter[str] = Counter()
        self.strays: Counter[str] = Counter()

    def store(self, replica: str, namespace: str | None, tokens: Tokens, first: int, tier: str) -> None:
        """The full blocks of `tokens` from number `first` on."""
        held = self.replicas[replica]
        placed = first == 0 or (namespace, tokens[: first * BLOCK]) in held
        for n in range(first + 1, len(tokens) // BLOCK + 1):
            key = namespace, tokens[: n * BLOCK]
            placed = placed or key in held
            if placed:
                held.setdefault(key, Counter())[tier] += 1
            else:
                self.orphans[replica] += 1

    def remove(self, replica: str, namespace: str | None, prefix: Tokens, tier: str) -> None:
        held = self.replicas[replica]
        found = held.get((namespace, prefix))
        if not found or not found[tier]:
            self.strays[replica] += 1
            return
        found[tier] -= 1
        if not +found:
            del held[namespace, prefix]

    def clear(self, replica: str) -> None:
        self.replicas[replica] = {}
        self.orphans[replica] = self.strays[replica] = 0

    def routed(self, replica: str, namespace: str | None, tokens: Tokens) -> int:
        n = 0
        while (n + 1) * BLOCK <= len(tokens) and (namespace, tokens[: (n + 1) * BLOCK]) in self.replicas[replica]:
            n += 1
        return n * BLOCK

    def tiers(self, replica: str, namespace: str | None, tokens: Tokens) -> dict[str, int]:
        split: Counter[str] = Counter()
        for n in range(1, self.routed(replica, namespace, tokens) // BLOCK + 1):
            found = self.replicas[replica][namespace, tokens[: n * BLOCK]]
            split[next(tier for tier in copies.TIERS if found[tier])] += BLOCK
        return dict(split)


def nodes(index: PrefixIndex) -> list[Node]:
    found: list[Node] = []
    todo: list[Node] = [root for sizes in index.forest.trees.values() for root in sizes.values()]
    while todo:
        node = todo.pop()
        children = node.branch.nodes if node.branch is not None else [node.only] if node.only is not None else []
        for child in children:
            assert child is not None
            assert child.parent is node
        if node.branch is not None:
            assert node.only is None
            assert len(children) > 1
            assert node.branch.keys == sorted(child.key for child in node.branch.nodes)
        if isinstance(node, Root):
            assert children, "an empty tree is kept"
        else:
            found.append(node)
        todo.extend(children)
    return found


def check(index: PrefixIndex, bounded: bool = True) -> None:
    """The invariants."""
    found = nodes(index)
    assert len(found) == index.forest.blocks
    if bounded:
        assert index.forest.blocks <= index.limit
    assert set(index.forest.ghosts) == {node for node in found if not node.held and node.childless}
    attached = set(found)
    alive = 0
    for replica in index.replicas.values():
        assert not alive & (replica.bit | replica.shadow)
        alive |= replica.bit | replica.shadow
        assert len(replica.nodes) <= replica.limit
        assert replica.claimed <= replica.limit
        assert len(replica.pending) <= replica.limit
        known = {node for node in replica.nodes.values() if replica.of(node)}
        assert known <= attached
        assert set(replica.odd) <= known
        assert set(replica.pending) <= attached
        assert set(replica.inferred) <= attached
        assert replica.claimed == sum(copies.total(replica.of(node)) for node in known)
        mine = replica.bit | replica.shadow
        for node in found:
            assert node.held & mine == replica.bits(node, replica.of(node)), node.key
        assert all(replica.of(node) == copies.NONE for node in attached - known)
    for replica in index._retired:
        alive |= replica.bit | replica.shadow
    assert not any(node.held & ~alive for node in found)
