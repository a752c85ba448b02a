"""Finding a child among siblings: right, and of bounded cost whatever a user sends."""

from __future__ import annotations

from bisect import bisect_right

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import tree
from kvcache.tree import ROUNDS, Branch, Forest, Node, common_prefix, walk

small = st.text("ab", min_size=1, max_size=7).map(str.encode)


@settings(deadline=None)
@given(st.sets(small, min_size=2, max_size=12), st.text("ab", max_size=12).map(str.encode), st.integers(0, 3))
def test_a_branch_finds_the_longest_child_that_the_prompt_begins_with(keys: set[bytes], prompt: bytes, at: int) -> None:
    one, two, *rest = (Node(key, None) for key in keys)
    branch = Branch(one, two)
    for node in rest:
        branch.add(node)
    found = branch.find(prompt, at)
    fitting = [key for key in keys if prompt.startswith(key, at)]
    assert (found.key if found else None) == max(fitting, key=len, default=None)
    for node in rest:
        assert branch.exact(node.key) is node
        branch.remove(node)
        assert branch.exact(node.key) is None


@given(st.binary(max_size=20), st.binary(max_size=20))
def test_common_prefix(a: bytes, b: bytes) -> None:
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n in (len(a), len(b)) or a[n] != b[n]


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(st.sampled_from([b"x", b"yy", b"zz"]), max_size=5), st.booleans()), max_size=12))
def test_what_is_let_go_of_can_be_forgotten_to_the_last_block(paths: list[tuple[list[bytes], bool]]) -> None:
    forest, ends = Forest(), []
    for path, keep in paths:
        node: Node = forest.root(None, 2)
        for key in path:
            node = forest.place(node, key)
        if path and keep:
            forest.hold(node, 1)
            ends.append(node)
        forest.discard(forest.root(None, 2))
    forest.forget(100)
    assert forest.blocks == len({id(node) for end in ends for node in _up(end)})
    for node in ends:
        forest.let_go(node, 1, 0.0)
    forest.forget(100)
    assert not forest.blocks
    assert not forest.trees
    assert not forest.ghosts


def _up(node: Node) -> list[Node]:
    found = []
    while node.parent is not None:
        found.append(node)
        node = node.parent
    return found


@pytest.fixture
def bisections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bisections were made: what a step of a walk costs beside comparing the child's bytes."""
    counted: list[int] = []
    original = bisect_right

    def bisect(keys: list[bytes], text: bytes) -> int:
        counted.append(len(text))
        return original(keys, text)

    monkeypatch.setattr(tree, "bisect_right", bisect)
    return counted


def test_siblings_of_many_lengths_cost_one_bisection(bisections: list[int]) -> None:
    """A user sends first blocks of every length: others do not pay for them."""
    forest = Forest()
    root = forest.root(None, 16)
    for length in range(2, 2000):
        forest.hold(forest.place(root, b"v" * (length - 1) + b"!"), 1)
    forest.hold(forest.place(root, b"victim's first block, of a common length"), 2)
    ends = walk(root, b"victim's first block, of a common length, and on", 3)
    assert [(blocks, bits) for blocks, bits, _ in ends] == [(1, 2)]
    assert len(bisections) == 1


def test_a_comb_of_siblings_cannot_make_a_walk_quadratic(bisections: list[int]) -> None:
    """Each block of the path has siblings that leave it one byte further on: a walk's work stays a constant a block."""
    forest, path, width = Forest(), 50, 60
    node: Node = forest.root(None, 16)
    key = b"a" * width
    for _ in range(path):
        for leaves in range(1, width):
            forest.hold(forest.place(node, key[:leaves] + b"A"), 1)  # sorts before the text and shares `leaves` bytes
            forest.hold(forest.place(node, key[:leaves] + b"b"), 1)
        node = forest.place(node, key)
        forest.hold(node, 1)
    root = forest.root(None, 16)
    assert walk(root, key * path, 1)[-1][0] == path
    assert len(bisections) == path
    bisections.clear()
    assert walk(root, (key * path)[:-1] + b"0", 1)[-1][0] == path - 1
    assert len(bisections) <= path - 1 + ROUNDS
    bisections.clear()
    walk(root, b"a" * 10 + b"X" + b"a" * 10_000, 1)
    assert len(bisections) <= ROUNDS


def test_a_prompt_that_hits_nothing_is_not_read(bisections: list[int]) -> None:
    forest = Forest()
    root = forest.root(None, 16)
    for first in range(256):
        forest.hold(forest.place(root, bytes([first]) * 40), 1)
    assert not walk(root, bytes(range(256)) * 4000, 1)
    assert bisections == [40]
