"""Which replica holds which block, and how much of a prompt that is: one walk over the prompt's bytes answers for all.

Fed by the engines' events, with token ids already decoded to bytes (or, for tokenizers that cannot be matched by bytes, packed
by `spelling.packed`: the index never knows the difference). An engine's hashes only resolve its parents and removals, so no
seed, algorithm or block size has to be the same anywhere.

Nothing here grows without bound, whatever the events are: a replica has a limit of blocks, and so have all trees together.
Not safe to use from several threads at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from math import lcm

from kvcache import copies
from kvcache.copies import GPU, NONE, PLAIN, Copies, Group, Lane
from kvcache.match import NOTHING, Ends, Granularity, Match, Remembered
from kvcache.replica import Counters, Hash, Replica
from kvcache.tree import Forest, Node, walk

MARGIN = 1.1  # blocks a replica may claim, over its own count: events of one step may overlap
MEMORY = 0.25  # blocks nobody holds that are remembered, over those that can be held
SPARE = 1024  # blocks, so that a small engine has some memory too
SIZES = 8  # block sizes within one namespace; more are a fault
GROUPS = 64  # KV groups of one replica; more are a fault
TIDY = 16  # blocks of dropped replicas put away with each event, besides twice its own blocks
FEW = 4  # replicas that are looked up one by one; larger sets are remembered
MEMBERS = 4096  # such sets

ONE_GROUP = Group()


class PrefixIndex:
    """`now` is the caller's clock in seconds; it only dates what is let go of. Replica names are the caller's."""

    def __init__(self) -> None:
        self.forest = Forest()
        self.replicas: dict[str, Replica] = {}
        self.limit = SPARE  # blocks in all trees
        self._retired: list[Replica] = []
        self._names: dict[int, str] = {}  # by bit
        self._alive = self._special = self._used = 0  # bits
        self._members: dict[int, tuple[str, ...]] = {}

    # -- replicas

    def add(self, replica: str, blocks: int) -> None:
        """A new replica, of so many KV blocks in all its tiers, or the new capacity of a known one."""
        known = self.replicas.get(replica)
        if known is None:
            self._admit(Replica(replica, 0, 0))
        self.replicas[replica].limit = int(max(blocks, 1) * MARGIN) + TIDY
        self._bound()

    def drop(self, replica: str, now: float = 0.0) -> None:
        """The replica is gone. At once for matches; its blocks are put away little by little (`tidy`)."""
        known = self.replicas.pop(replica, None)
        if known is not None:
            self._retire(known, now)
            self._bound()

    def clear(self, replica: str, now: float = 0.0) -> None:
        """The replica holds nothing any more: all blocks cleared, restarted, or about to be replayed from the start.

        Also ends any doubt. What its groups are is learnt anew.
        """
        known = self.replicas[replica]
        self._retire(known, now)
        self._admit(Replica(replica, 0, known.limit, granularity=known.granularity))

    def doubt(self, replica: str) -> None:
        """Events of this replica are missing: it is uncertain until cleared or trusted."""
        self.replicas[replica].doubted = True

    def trust(self, replica: str, forgive: bool = False) -> None:
        """The doubt is over. `forgive`: also what the events themselves made doubtful counts no more."""
        known = self.replicas[replica]
        known.doubted = False
        if forgive:
            known.counters = Counters()

    def uncertain(self, replica: str) -> bool:
        known = self.replicas[replica]
        return known.doubted or known.counters.doubtful

    def held(self, replica: str, tier: str = GPU) -> int:
        """KV blocks of the replica's tier that hold a reusable prefix; without events, those inferred."""
        known = self.replicas[replica]
        return known.tally.get(tier, 0) + (len(known.inferred) if tier == GPU else 0)

    def counters(self, replica: str) -> Counters:
        return self.replicas[replica].counters

    def _admit(self, replica: Replica) -> None:
        replica.bit = self._free_bit()
        self.replicas[replica.name] = replica
        self._names[replica.bit] = replica.name
        self._alive |= replica.bit
        if replica.granularity is not None:
            self._special |= replica.bit

    def _free_bit(self) -> int:
        bit = ~self._used & (self._used + 1)
        self._used |= bit
        return bit

    def _retire(self, replica: Replica, now: float) -> None:
        self._alive &= ~replica.bit
        self._special &= ~replica.bit
        del self._names[replica.bit]
        self._members.clear()
        replica.doubted = True
        self._retired.append(replica)
        self.tidy(TIDY, now)

    def tidy(self, blocks: int, now: float = 0.0) -> int:
        """Put away up to that many blocks of dropped and cleared replicas; how many are left."""
        while self._retired and blocks > 0:
            replica = self._retired[-1]
            bits = replica.bit | replica.shadow
            for table in (replica.nodes, replica.pending, replica.inferred, replica.odd):
                while table and blocks > 0:
                    item = table.popitem()
                    node = item[1] if isinstance(item[1], Node) else item[0]
                    assert isinstance(node, Node)
                    self.forest.let_go(node, bits, now)
                    blocks -= 1
            if not (replica.nodes or replica.pending or replica.inferred or replica.odd):
                self._used &= ~bits
                self._retired.pop()
        self.forest.forget(min(blocks, self.forest.blocks - self.limit))
        return sum(len(r.nodes) + len(r.pending) + len(r.inferred) + len(r.odd) for r in self._retired)

    def _bound(self) -> None:
        self.limit = int(sum(r.limit for r in self.replicas.values()) * (1 + MEMORY)) + SPARE

    # -- events

    def store(
        self,
        replica: str,
        hashes: Sequence[Hash],
        *,
        parent: Hash | None,
        blocks: Sequence[bytes] | None,
        block_size: int,
        namespace: Hashable = None,
        tier: str = GPU,
        group: Group = ONE_GROUP,
        now: float = 0.0,
    ) -> None:
        """The replica holds these consecutive blocks, one copy more of each.

        `parent`: the engine's hash of the block before, None at the beginning of a prompt, which is then one of `namespace`
        (model, LoRA, salt). `blocks`: the bytes of each; None where the event has no tokens, or not one run for each hash.
        """
        known = self.replicas[replica]
        self.tidy(TIDY + 2 * len(hashes), now)
        if blocks is not None and len(blocks) != len(hashes):
            blocks = None
        if len(hashes) > known.limit:
            known.counters.shed += len(hashes) - known.limit
            hashes = hashes[: known.limit]
        if group.block_size and group.index not in known.groups:
            self._learn(known, group)
        if blocks is not None and block_size != known.block_size:
            if not known.block_size or (block_size < known.block_size and group.kind == "full"):
                known = self._resize(known, block_size, group, now)
            else:
                blocks = None
        self.make_room(len(hashes), now)
        node: Node | None = None
        root = None
        if parent is not None:
            node = self._attached(known.nodes.get(parent))
        elif blocks is not None:
            node = root = self.root(namespace, block_size)
        stored = self._place(known, node, hashes, blocks, (group.index, tier), now)
        if root is not None:
            self.forest.discard(root)
        known.tally[tier] = known.tally.get(tier, 0) + stored
        if known.claimed > known.limit or len(known.nodes) > known.limit:
            self._recount(known, now)

    def _place(
        self,
        replica: Replica,
        node: Node | None,
        hashes: Sequence[Hash],
        blocks: Sequence[bytes] | None,
        lane: Lane,
        now: float,
    ) -> int:
        """Add a copy of each block, the first of which follows `node`; how many found their place."""
        nodes, counters, stored = replica.nodes, replica.counters, 0
        for i, name in enumerate(hashes):
            known = self._attached(nodes.get(name))
            if known is not None:
                node = known
            elif blocks is None or not blocks[i]:
                counters.unplaced += 1
                node = None
                continue
            elif node is None:
                counters.orphans += 1
                continue
            else:
                node = nodes[name] = self.forest.place(node, blocks[i])
            held = replica.of(node)
            replica.pending.pop(node, None)
            replica.inferred.pop(node, None)
            self._set(replica, node, copies.added(held, lane), now)
            stored += 1
        return stored

    def remove(
        self, replica: str, hashes: Iterable[Hash], *, tier: str = GPU, group: int = 0, now: float = 0.0
    ) -> None:
        """One copy less of each block, in this tier and group. A block counts as held while it has any copy."""
        known = self.replicas[replica]
        lane = (group, tier)
        for name in hashes:
            node = known.nodes.get(name)
            left = None if node is None else copies.removed(known.of(node), lane)
            if node is None or left is None:
                known.counters.strays += 1
                continue
            known.tally[tier] -= 1
            if not left:
                del known.nodes[name]
            self._set(known, node, left, now)

    def root(self, namespace: Hashable, block_size: int) -> Node | None:
        """The root of a tree, made where it is missing: place a block there, or discard it."""
        sizes = self.forest.trees.get(namespace, {})
        return self.forest.root(namespace, block_size) if block_size in sizes or len(sizes) < SIZES else None

    def _attached(self, node: Node | None) -> Node | None:
        """The node, unless it was taken out of its tree."""
        return node if node is not None and node.parent is not None else None

    def _set(self, replica: Replica, node: Node, held: Copies, now: float) -> None:
        if held == NONE or (held == PLAIN and replica.complete(PLAIN)):
            replica.odd.pop(node, None)
        else:
            replica.odd[node] = held
        self._settle(replica, node, held, now)

    def lapse(self, replica: Replica, node: Node, now: float) -> None:
        """The block is no longer expected, or no longer inferred."""
        self._settle(replica, node, replica.odd.get(node, NONE), now)

    def _settle(self, replica: Replica, node: Node, held: Copies, now: float) -> None:
        """Give the node the bits that go with what the replica has of it."""
        bits = replica.bits(node, held)
        if bits & ~node.held:
            self.forest.hold(node, bits)
        surplus = (replica.bit | replica.shadow) & ~bits
        if surplus & node.held:
            self.forest.let_go(node, surplus, now)

    def _learn(self, replica: Replica, group: Group) -> None:
        """A group not heard of before; what the replica holds is judged anew, once a group."""
        if len(replica.groups) >= GROUPS:
            return
        before = {node: replica.of(node) for node in replica.nodes.values()}
        replica.learn(group)
        if len(replica.groups) > 1 and not replica.shadow:
            replica.shadow = self._free_bit()
            self._special |= replica.bit
        for node, held in before.items():
            if held:
                replica.odd[node] = held  # the bit says no longer that it is a plain one
                self._set(replica, node, held, 0.0)

    def _resize(self, replica: Replica, block_size: int, group: Group, now: float) -> Replica:
        """The first block of a replica, or a finer full group than the one that it was indexed by."""
        if replica.block_size:
            self.clear(replica.name, now)
            replica = self.replicas[replica.name]
            replica.doubted = True
            self._learn(replica, group)
        replica.block_size = block_size
        return replica

    # -- bounds

    def make_room(self, blocks: int, now: float) -> None:
        """See that so many blocks can be placed. What goes first: the replicas that are gone, blocks nobody holds, and
        then blocks of the replica that claims most, which becomes uncertain."""
        forest = self.forest
        excess = forest.blocks + blocks - self.limit
        if excess <= 0:
            return
        excess -= forest.forget(excess)
        while excess > 0 and self._retired:
            self.tidy(excess + TIDY, now)
            excess -= forest.forget(excess)
        while excess > 0:
            claims = {r.name: len(r.nodes) + len(r.pending) + len(r.inferred) for r in self.replicas.values()}
            most = max(claims, key=lambda name: claims[name], default=None)
            if most is None or not claims[most]:
                return
            self._shed(self.replicas[most], excess + TIDY, now)
            excess -= forest.forget(excess)

    def _recount(self, replica: Replica, now: float) -> None:
        """The replica claims more than it can have: duplicates were no copies, or removals got lost."""
        replica.counters.recounts += 1
        for node, held in list(replica.odd.items()):
            once = copies.single(held)
            replica.uncount(held, once)
            self._set(replica, node, once, now)
        surplus = max(replica.claimed, len(replica.nodes)) - replica.limit
        if surplus > 0:
            self._shed(replica, surplus + replica.limit // 64, now)

    def _shed(self, replica: Replica, blocks: int, now: float) -> None:
        """Take the longest held blocks for gone."""
        for name in list(islice(replica.nodes, blocks)):
            node = replica.nodes.pop(name)
            replica.uncount(replica.of(node), NONE)
            replica.counters.shed += 1
            self._set(replica, node, NONE, now)
            blocks -= 1
        for table in (replica.inferred, replica.pending):
            for node in list(islice(table, max(0, blocks))):
                del table[node]
                self.lapse(replica, node, now)
                blocks -= 1

    # -- matching

    def match(self, prompt: bytes, namespace: Hashable = None) -> Match:
        """What every replica holds of this prompt. Work grows with the blocks that hit, not with the prompt's length."""
        trees = self.forest.trees.get(namespace)
        if trees is None:
            return NOTHING
        names, special = self._names, self._special
        tokens: dict[str, int] = {}
        found: list[Ends] = []
        for size, root in trees.items():
            ends = walk(root, prompt, self._alive)
            found.append((size, ends))
            for blocks, bits, node in ends:
                length, rest = blocks * size, bits
                if bits.bit_count() > FEW:
                    tokens.update(dict.fromkeys(self._members_of(bits), length))
                    rest = 0
                while rest:
                    lowest = rest & -rest
                    tokens[names[lowest]] = length
                    rest ^= lowest
                if bits & special:
                    self._correct(tokens, bits & special, blocks, size, node)
        if not tokens:
            return NOTHING
        return Match(tokens, max(tokens.values()), tuple(found))

    def _members_of(self, bits: int) -> tuple[str, ...]:
        members = self._members.get(bits)
        if members is None:
            if len(self._members) > MEMBERS:
                self._members.clear()
            names, rest = [], bits
            while rest:
                lowest = rest & -rest
                names.append(self._names[lowest])
                rest ^= lowest
            members = self._members[bits] = tuple(names)
        return members

    def _correct(self, tokens: dict[str, int], bits: int, blocks: int, size: int, node: Node) -> None:
        """Shorten what replicas with several groups or a coarse grain can use of their prefix."""
        for name in self._members_of(bits):
            usable = self._aligned(self.replicas[name], blocks, size, node) * size
            if usable:
                tokens[name] = usable
            else:
                del tokens[name]

    def _aligned(self, replica: Replica, blocks: int, size: int, node: Node) -> int:
        """The longest prefix, in blocks, after which every group has what it needs to go on from there."""
        needs = [(g.index, max(1, g.block_size // size), g.tail) for g in replica.partial]
        grain = replica.granularity.tokens if replica.granularity is not None else size
        step = lcm(max(1, grain // size), *(ratio for _, ratio, _ in needs))
        end = blocks // step * step
        reach = max((ratio * tail for _, ratio, tail in needs), default=0)
        at: Node | None = node
        depth = blocks
        while at is not None and depth and depth > end - reach:
            if depth <= end and at not in replica.pending:
                groups = copies.groups(replica.of(at))
                for index, ratio, tail in needs:
                    if depth % ratio == 0 and (end - depth) // ratio < tail and index not in groups:
                        end = (depth - 1) // step * step
            at, depth = at.parent, depth - 1
        return end

    def learn_granularity(self, replica: str, held: int, delivered: int) -> None:
        """A request without concurrent evictions ended: what the replica held of it, and what it delivered, in tokens."""
        known = self.replicas[replica]
        if known.granularity is None:
            if not known.block_size:
                return
            known.granularity = Granularity(known.block_size)
        known.granularity.observe(held, delivered)
        if known.granularity.tokens != known.block_size:
            self._special |= known.bit

    def tiers(self, match: Match, replica: str) -> dict[str, int]:
        """The tokens of `match.routed(replica)` by the fastest tier that holds them. Ask before the next event."""
        tokens = match.routed(replica)
        known = self.replicas[replica]
        if not tokens or not known.odd:
            return {GPU: tokens} if tokens else {}
        found: dict[str, int] = {}
        for node, size in self._path(match, known):
            tier = copies.tier(known.of(node))
            found[tier] = found.get(tier, 0) + size
        return found

    def in_flight(self, match: Match, replica: str) -> int:
        """The tokens at the end of `match.routed(replica)` that depend on requests still under way. Ask before the next
        event."""
        known = self.replicas[replica]
        if not known.pending or not match.routed(replica):
            return 0
        waiting, after = 0, 0
        for node, size in self._path(match, known):
            after += size
            if node in known.pending:
                waiting = after
        return waiting

    def _path(self, match: Match, replica: Replica) -> Iterable[tuple[Node, int]]:
        """The blocks of the match from its last to its first, with their tokens."""
        tokens = match.routed(replica.name)
        for size, ends in match.ends:
            for blocks, bits, last in ends:
                node: Node | None = last if bits & replica.bit else None
                depth = blocks
                while node is not None and depth:
                    if depth * size <= tokens:
                        yield node, size
                    node, depth = node.parent, depth - 1

    def remembered(self, prompt: bytes, namespace: Hashable = None) -> Remembered:
        """What was ever known of the prompt and is not forgotten: beyond `available`, it is evicted rather than new."""
        best = Remembered(0, None)
        for size, root in self.forest.trees.get(namespace, {}).items():
            blocks, since = 0, None
            for node in self.forest.known(root, prompt):
                blocks += 1
                if since is None and not node.held & self._alive:
                    since = node.since
            if blocks * size > best.tokens:
                best = Remembered(blocks * size, since)
        return best
