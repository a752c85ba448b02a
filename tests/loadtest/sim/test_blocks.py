"""pytest tests/loadtest/sim/test_blocks.py: hashes, the free queue and what a request gets, without a clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.sim.blocks import BlockPool, Cleared, Removed, Stored
from loadtest.sim.cache import KvCache
from loadtest.sim.hashing import Lora, event_id
from loadtest.sim.request import Request

SIZE = 4


def request(tokens: Sequence[int], name: str = "r", **key: Any) -> Request:
    return Request(name, list(tokens), 1, SIZE, **key)


def run(cache: KvCache, tokens: Sequence[int], **key: Any) -> int:
    """A prompt from look-up to the end; returns the cached tokens."""
    one = request(tokens, **key)
    hit = cache.hit(one)
    assert cache.allocate(one, len(one.tokens) - len(hit) * SIZE, hit, whole=True)
    cache.free(one)
    return len(hit) * SIZE


@pytest.mark.parametrize(
    ("key", "first", "second", "identity"),
    [
        ({}, "605fd9e311c08901", "f1a08810157991d5", 3356471519746799895),
        ({"salt": "abc"}, "439e3ffb5ebef43e", "af116621ad69c007", 5095109080830789565),
        ({"lora": Lora("l", "/p", 1)}, "0a54bbaef6f34bdf", "59d2b06073efdfbe", 2995062226161405826),
    ],
)
def test_hashes_are_those_of_vllm(key: dict[str, Any], first: str, second: str, identity: int) -> None:
    """The vectors were computed with vLLM 0.32's own functions."""
    one = Request("r", list(range(100, 140)), 1, 16, **key)
    assert [block.hex()[:16] for block in one.hashes] == [first, second]
    assert event_id(one.hashes[1]) == identity


def test_the_last_token_is_always_computed() -> None:
    cache = KvCache(10, SIZE, 100)
    assert run(cache, range(8)) == 0
    assert run(cache, range(8)) == 4  # not 8: the second block holds the last token
    assert run(cache, range(9)) == 8


def test_salt_and_lora_keep_prefixes_apart() -> None:
    cache = KvCache(20, SIZE, 100)
    run(cache, range(9), salt="a")
    assert run(cache, range(9)) == 0
    assert run(cache, range(9), salt="b") == 0
    assert run(cache, range(9), salt="a") == 8
    assert run(cache, range(9), lora=Lora("x", "/x", 1)) == 0
    assert run(cache, range(9), lora=Lora("x", "/other", 1)) == 0
    assert run(cache, range(9), lora=Lora("x", "/x", 1)) == 8


def test_a_chain_is_evicted_from_its_tail() -> None:
    cache = KvCache(5, SIZE, 100)  # four usable blocks
    run(cache, range(12))
    run(cache, range(100, 108))  # takes the last free block and one of the three
    assert run(cache, [*range(12), 99]) == 8


def test_blocks_that_hold_no_prefix_are_reused_first() -> None:
    cache = KvCache(5, SIZE, 100)
    run(cache, range(6))  # one full block and one that is not
    partial = cache.pool.free_order()[0]
    run(cache, range(100, 103))
    assert cache.pool.free_order()[0] is partial
    assert run(cache, range(6)) == 4


def test_copies_are_kept_and_the_oldest_is_hit() -> None:
    cache = KvCache(9, SIZE, 100)
    twins = [request(range(5), "one"), request(range(5), "two")]
    assert cache.hit(twins[0]) == cache.hit(twins[1]) == []
    for twin in twins:
        assert cache.allocate(twin, 5)
    assert cache.pool.cached_count == 2
    assert cache.hit(request(range(5))) == [twins[0].blocks[0]]
    assert twins[0].blocks[0] is not twins[1].blocks[0]


def test_events_tell_what_was_stored_and_evicted() -> None:
    cache = KvCache(3, SIZE, 100)
    run(cache, range(8), salt="s")
    (stored,) = cache.pool.take_events()
    assert isinstance(stored, Stored)
    assert stored.tokens.tolist() == list(range(8))
    assert stored.parent is None
    assert stored.keys == ((("cache_salt", "s"),), None)
    run(cache, range(50, 55))
    tail, head, new = cache.pool.take_events()
    assert (tail, head) == (Removed(stored.hashes[1]), Removed(stored.hashes[0]))
    assert isinstance(new, Stored)


def test_a_reset_waits_until_no_block_is_held() -> None:
    cache = KvCache(5, SIZE, 100)
    held = request(range(5))
    assert cache.allocate(held, 5)
    assert not cache.pool.reset()
    cache.free(held)
    cache.pool.take_events()
    assert cache.pool.reset()
    assert cache.pool.take_events() == [Cleared()]
    assert run(cache, range(5)) == 0


def test_what_does_not_fit_changes_nothing() -> None:
    cache = KvCache(4, SIZE, 100)
    run(cache, range(4))
    before = cache.pool.free_order()
    big = request(range(20))
    assert not cache.allocate(big, 4, cache.hit(big), whole=True)
    assert cache.pool.free_order() == before
    assert big.blocks == []


def test_without_prefix_caching_nothing_is_hit_or_told() -> None:
    cache = KvCache(10, SIZE, 100, enabled=False)
    assert [run(cache, range(9)) for _ in range(2)] == [0, 0]
    assert cache.pool.take_events() == []


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)


class Ideal:
    """A prefix cache told in other words: each usable block holds a prefix, and the one used longest ago goes first."""

    def __init__(self, usable: int) -> None:
        self.free: list[tuple[object, ...] | None] = [None] * usable

    def run(self, salt: object, tokens: Sequence[int]) -> int:
        prefixes = [(salt, *tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)]
        partial = len(tokens) % SIZE != 0
        hits = 0
        while hits < (len(tokens) - 1) // SIZE and prefixes[hits] in self.free:
            hits += 1
        for prefix in prefixes[:hits]:
            self.free.remove(prefix)
        del self.free[: len(prefixes) - hits + partial]
        self.free = [None] * partial + self.free + list(reversed(prefixes))
        return hits * SIZE


@given(
    st.integers(8, 30),
    st.lists(
        st.tuples(st.sampled_from([None, "a", "b"]), st.lists(st.integers(0, 1), min_size=1, max_size=26)), max_size=60
    ),
)
def test_sequential_requests_hit_what_an_ideal_lru_of_prefixes_hits(
    usable: int, prompts: list[tuple[str | None, list[int]]]
) -> None:
    cache, ideal = KvCache(usable + 1, SIZE, 100), Ideal(usable)
    for salt, tokens in prompts:
        assert run(cache, tokens, salt=salt) == ideal.run(salt, tokens)
        assert cache.pool.free_count == usable
