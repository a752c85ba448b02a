"""From a hit to what an engine can deliver of it: last token, last block, windows, states, grains."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.copies import CPU, GPU, Group
from kvcache.index import PrefixIndex
from kvcache.match import Granularity, floor, reusable, usable

FULL = Group(0, "full", 16)


def test_the_last_token_and_the_last_block_never_hit() -> None:
    assert [reusable(n, 16) for n in (0, 1, 16, 17, 32, 33)] == [0, 0, 0, 16, 16, 32]
    assert [floor(n, 16) for n in (0, 1, 16, 17, 32, 33)] == [0, 1, 16, 1, 16, 1]
    assert usable(32, 32, 16) == 16
    assert usable(32, 40, 16) == 32
    assert usable(32, 40, 16, dropped=1) == 16
    assert usable(16, 4000, 16, dropped=1) == 0
    assert floor(129, 128) == 1


@given(st.integers(0, 5000), st.integers(0, 300), st.sampled_from([1, 16, 128, 528]), st.integers(0, 1))
def test_no_token_is_lost_between_floor_and_hit(prompt: int, held: int, block: int, dropped: int) -> None:
    most = reusable(prompt, block, dropped)
    assert most + floor(prompt, block, dropped) == prompt
    assert most <= max(0, prompt - 1)
    assert 0 <= usable(held * block, prompt, block, dropped) <= min(most, held * block)
    assert usable(prompt + block, prompt, block, dropped) == most


def test_a_coarse_grain_is_learnt_from_deliveries() -> None:
    grain = Granularity(16)
    for held, delivered in ((64, 64), (160, 160)):
        grain.observe(held, delivered)
    assert grain.tokens == 16
    for held in (100 * 16, 50 * 16, 70 * 16, 90 * 16, 80 * 16):
        grain.observe(held, held // 528 * 528)
    assert grain.tokens == 528
    grain.observe(600, 528)
    assert grain.tokens == 528
    grain.observe(800, 784)
    assert grain.tokens == 16


def test_an_eviction_is_no_grain() -> None:
    grain = Granularity(16)
    for _ in range(20):
        grain.observe(320, 0)
        grain.observe(320, 128)
    assert grain.tokens == 16


def index_of(blocks: int, groups: dict[Group, list[int]]) -> tuple[PrefixIndex, bytes]:
    """A replica with a prompt of one-byte blocks of 16 tokens: the numbers of the blocks that each group holds."""
    index = PrefixIndex()
    index.add("a", 1000)
    prompt = bytes(range(1, blocks + 1))
    for group, held in groups.items():
        ratio = group.block_size // 16
        hashes = [n * ratio for n in held]  # the hash of a coarse block is that of its last fine one
        keys = [bytes([n]) for n in prompt]
        whole = group.kind == "full" and held == list(range(1, blocks + 1))
        index.store("a", hashes, parent=None, blocks=keys if whole else None, block_size=group.block_size, group=group)
    return index, prompt


def test_a_sliding_window_needs_the_end_of_the_prefix_only() -> None:
    window = Group(1, "window", 16, 33)  # two blocks in front of the point to go on from
    assert window.tail == 2
    index, prompt = index_of(8, {FULL: list(range(1, 9)), window: [3, 4, 6, 8]})
    assert index.match(prompt).tokens == {"a": 4 * 16}
    assert index.match(prompt[:7]).tokens == {"a": 4 * 16}
    index, prompt = index_of(8, {FULL: list(range(1, 9)), window: [1, 7, 8]})
    assert index.match(prompt).tokens == {"a": 8 * 16}
    assert index.match(prompt[:7]).tokens == {"a": 16}, "the window reaches back to the prompt's beginning"


def test_a_state_is_needed_where_the_hit_ends() -> None:
    state = Group(1, "state", 64)
    index, prompt = index_of(12, {FULL: list(range(1, 13)), state: [2]})
    assert index.match(prompt).tokens == {"a": 8 * 16}
    assert not index.match(prompt[:7]).tokens
    index.remove("a", [8], group=1)
    assert not index.match(prompt).tokens


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 10),
    st.sets(st.integers(1, 10)),
    st.sets(st.integers(1, 5)),
    st.integers(1, 5),
    st.integers(0, 10),
)
def test_hybrid_hits_are_what_every_group_allows(
    blocks: int, window_held: set[int], state_held: set[int], tail: int, asked: int
) -> None:
    window = Group(1, "window", 16, 16 * tail)
    state = Group(2, "state", 32)
    in_window = sorted(n for n in window_held if n <= blocks)
    states = sorted(n for n in state_held if n * 2 <= blocks)
    index, prompt = index_of(blocks, {FULL: list(range(1, blocks + 1)), window: in_window, state: states})
    best = 0
    for end in range(2, min(asked, blocks) + 1, 2):
        enough = all(n in in_window for n in range(max(1, end - window.tail + 1), end + 1))
        if enough and end // 2 in states:
            best = end
    assert index.match(prompt[:asked]).routed("a") == best * 16


def test_two_full_groups_both_have_to_hold_a_block() -> None:
    other = Group(1, "full", 16)
    index, prompt = index_of(3, {FULL: [1, 2, 3], other: [1, 2]})
    assert index.match(prompt).tokens == {"a": 32}
    index.remove("a", [2], group=0)
    assert index.match(prompt).tokens == {"a": 16}
    assert index.replicas["a"].nodes.keys() == {1, 2, 3}


def test_a_coarse_grain_cuts_the_match() -> None:
    index, prompt = index_of(8, {FULL: list(range(1, 9))})
    for n in (3, 5, 7, 3, 5, 7):
        index.learn_granularity("a", n * 16, (n - 1) * 16 // 32 * 32)
    assert index.match(prompt[:7]).tokens == {"a": 6 * 16}
    index.learn_granularity("a", 48, 48)
    assert index.match(prompt[:7]).tokens == {"a": 7 * 16}


def test_the_fastest_tier_counts() -> None:
    index, prompt = index_of(4, {FULL: [1, 2, 3, 4]})
    index.store("a", [2, 3, 4], parent=1, blocks=None, block_size=16, tier=CPU, group=FULL)
    index.remove("a", [3, 4])
    match = index.match(prompt)
    assert match.tokens == {"a": 64}
    assert index.tiers(match, "a") == {GPU: 32, CPU: 32}
    index.remove("a", [4], tier=CPU)
    assert index.match(prompt).tokens == {"a": 48}
