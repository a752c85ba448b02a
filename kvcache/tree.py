"""Trees of blocks, keyed by the bytes that a block's tokens decode to.

A node is one full block under one particular prefix; its bytes vary in length, since a block is a fixed number of tokens. A
node with one child compares the prompt with that child's bytes in place; one with several finds the child by bisection, so
neither many siblings nor siblings of many lengths slow a walk down. There is one tree for each namespace and block size.

Knows bits, not replicas: who a bit stands for is the index's business.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Iterator

ROUNDS = 16  # how far nested siblings are followed; text never nests this deep, hostile token ids may
INTERNED = 4096  # masks kept for sharing


class Node:
    """A block. `held` has a bit for each holder, `since` is when the last holder let go (the caller's clock, seconds)."""

    __slots__ = ("branch", "held", "key", "only", "parent", "since")

    def __init__(self, key: bytes, parent: Node | None) -> None:
        self.key = key
        self.parent = parent  # None: the root of a tree, or taken out of it
        self.only: Node | None = None  # the child, where there is exactly one
        self.branch: Branch | None = None  # the children, where there are several
        self.held = 0
        self.since = 0.0

    @property
    def childless(self) -> bool:
        return self.only is None and self.branch is None


End = tuple[int, int, Node]  # blocks, the bits of those whose prefix ends after so many, its last block


class Root(Node):
    """Where the prompts of one namespace, in blocks of `block_size` tokens, begin."""

    __slots__ = ("block_size", "namespace")

    def __init__(self, namespace: Hashable, block_size: int) -> None:
        super().__init__(b"", None)
        self.namespace, self.block_size = namespace, block_size


class Branch:
    """Two or more children, sorted by their bytes."""

    __slots__ = ("keys", "longest", "nodes", "shortest")

    def __init__(self, first: Node, second: Node) -> None:
        self.nodes = sorted((first, second), key=lambda node: node.key)
        self.keys = [node.key for node in self.nodes]
        self.shortest, self.longest = sorted((len(first.key), len(second.key)))

    def exact(self, key: bytes) -> Node | None:
        at = bisect_left(self.keys, key)
        return self.nodes[at] if at < len(self.keys) and self.keys[at] == key else None

    def add(self, node: Node) -> None:
        at = bisect_left(self.keys, node.key)
        self.keys.insert(at, node.key)
        self.nodes.insert(at, node)
        self.shortest, self.longest = min(self.shortest, len(node.key)), max(self.longest, len(node.key))

    def remove(self, node: Node) -> None:
        at = bisect_left(self.keys, node.key)
        del self.keys[at], self.nodes[at]  # the two lengths stay bounds

    def find(self, prompt: bytes, at: int) -> Node | None:
        """The child whose bytes the prompt continues with at offset `at`; of nested ones the longest.

        Whatever sorts between that child and the prompt begins with the child, so each round either finds it or shortens
        the text to what the nearest sibling shares with it.
        """
        text = prompt[at : at + self.longest]
        keys = self.keys
        i = bisect_right(keys, text) - 1
        if i < 0:
            return None
        key = keys[i]
        return self.nodes[i] if text.startswith(key) else self._nested(text, key)

    def _nested(self, text: bytes, key: bytes) -> Node | None:
        """`key` sorts before the text and is no beginning of it: look among what both begin with."""
        keys = self.keys
        for _ in range(1, ROUNDS):
            shared = common_prefix(key, text)
            if shared < self.shortest:
                return None
            text = text[:shared]
            i = bisect_right(keys, text) - 1
            if i < 0:
                return None
            key = keys[i]
            if text.startswith(key):
                return self.nodes[i]
        return None


def common_prefix(a: bytes, b: bytes) -> int:
    """How many bytes the two have in common at their beginning."""
    n = min(len(a), len(b))
    differing = int.from_bytes(a[:n], "big") ^ int.from_bytes(b[:n], "big")
    return n - (differing.bit_length() + 7) // 8


class Forest:
    """All trees, with one bound on their blocks.

    A block that nobody holds stays while blocks hang on it, and after that until room is needed: so the ledger can tell an
    evicted block from one never seen. Those without holder and children are `ghosts`, the longest abandoned first.
    """

    def __init__(self) -> None:
        self.trees: dict[Hashable, dict[int, Root]] = {}
        self.ghosts: OrderedDict[Node, None] = OrderedDict()
        self.blocks = 0
        self._masks: dict[int, int] = {}

    def root(self, namespace: Hashable, block_size: int) -> Root:
        sizes = self.trees.setdefault(namespace, {})
        root = sizes.get(block_size)
        if root is None:
            root = sizes[block_size] = Root(namespace, block_size)
        return root

    def place(self, parent: Node, key: bytes) -> Node:
        """The child of `parent` with these bytes, made where it is missing. `key` is not empty."""
        only, branch = parent.only, parent.branch
        known = branch.exact(key) if branch is not None else only
        if known is not None and known.key == key:
            return known
        node = Node(key, parent)
        if branch is not None:
            branch.add(node)
        elif only is not None:
            parent.branch, parent.only = Branch(only, node), None
        else:
            parent.only = node
            self.ghosts.pop(parent, None)
        self.ghosts[node] = None
        self.blocks += 1
        return node

    def hold(self, node: Node, bits: int) -> None:
        """Add holders."""
        if not node.held:
            self.ghosts.pop(node, None)
        self._mask(node, node.held | bits)

    def let_go(self, node: Node, bits: int, now: float) -> None:
        """Take holders away."""
        if node.held & bits:
            self._mask(node, node.held & ~bits)
            if not node.held:
                node.since = now
                if node.childless:
                    self.ghosts[node] = None

    def _mask(self, node: Node, mask: int) -> None:
        if len(self._masks) > INTERNED:
            self._masks.clear()
        node.held = self._masks.setdefault(mask, mask)

    def forget(self, blocks: int) -> int:
        """Drop up to that many ghosts; how many went. What hung them becomes a ghost in its turn, the next to go."""
        gone = 0
        while gone < blocks and self.ghosts:
            node, _ = self.ghosts.popitem(last=False)
            self._detach(node)
            gone += 1
        return gone

    def _detach(self, node: Node) -> None:
        parent, node.parent = node.parent, None
        assert parent is not None
        branch = parent.branch
        if branch is None:
            parent.only = None
        else:
            branch.remove(node)
            if len(branch.nodes) == 1:
                parent.only, parent.branch = branch.nodes[0], None
        self.blocks -= 1
        if isinstance(parent, Root):
            self.discard(parent)
        elif parent.childless and not parent.held:
            self.ghosts[parent] = None
            self.ghosts.move_to_end(parent, last=False)

    def discard(self, node: Node) -> None:
        """Drop a tree that has no blocks. Any other node stays."""
        if isinstance(node, Root) and node.childless:
            sizes = self.trees[node.namespace]
            del sizes[node.block_size]
            if not sizes:
                del self.trees[node.namespace]

    def known(self, root: Root, prompt: bytes) -> Iterator[Node]:
        """The blocks on the prompt's way, whoever holds them or nobody."""
        node: Node | None = root
        at = 0
        while node is not None:
            child = node.only
            if child is None:
                child = node.branch.find(prompt, at) if node.branch is not None else None
            elif not prompt.startswith(child.key, at):
                child = None
            if child is not None:
                at += len(child.key)
                yield child
            node = child


def walk(root: Root, prompt: bytes, held: int) -> list[End]:
    """The lengths at which holders of the prompt's prefix end: contiguous from the first block.

    `held` are the bits that count. Lengths grow; a bit is in one entry at most; who holds nothing is in none. The work is
    one step a block, and ends where the last holder does.
    """
    ends: list[End] = []
    node: Node = root
    at = blocks = 0
    last = -1
    startswith = prompt.startswith
    while True:
        child = node.only
        if child is not None:
            if not startswith(child.key, at):
                break
        else:
            branch = node.branch
            if branch is None:
                break
            child = branch.find(prompt, at)
            if child is None:
                break
        mask = child.held
        if mask is not last:  # masks are interned: the same object nearly always
            last = mask
            kept = held & mask
            if kept != held:
                if blocks:
                    ends.append((blocks, held ^ kept, node))
                held = kept
                if not held:
                    return ends
        at += len(child.key)
        node = child
        blocks += 1
    if blocks and held:
        ends.append((blocks, held, node))
    return ends
