"""pytest tests/loadtest/sim/test_hashing.py: both ways to hash blocks tell the same prefixes apart."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.sim.hashing import ALGORITHMS, TOKEN, Algorithm, BlockHash, Chain, Lora

Prompt = tuple[str | None, Lora | None, list[int]]

PROMPTS = st.tuples(
    st.sampled_from([None, "a", "b"]),
    st.sampled_from([None, Lora("x", "/x", 1), Lora("x", "/y", 2), Lora("y", "/x", 3)]),
    st.lists(st.integers(0, 1), max_size=20),
)


def whole(hashing: Algorithm, prompt: Prompt, size: int) -> list[BlockHash]:
    salt, lora, tokens = prompt
    return hashing(Chain(size, 0, None, lora, salt), array(TOKEN, tokens))


@pytest.mark.parametrize("name", ALGORITHMS)
@given(first=PROMPTS, second=PROMPTS, size=st.sampled_from([1, 4]))
def test_hashes_are_equal_where_all_before_is_equal(name: str, first: Prompt, second: Prompt, size: int) -> None:
    ours, theirs = whole(ALGORITHMS[name], first, size), whole(ALGORITHMS[name], second, size)
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        end = (index + 1) * size
        assert (one == other) == ((*first[:2], first[2][:end]) == (*second[:2], second[2][:end]))
    assert len(set(ours)) == len(ours) == len(first[2]) // size


@pytest.mark.parametrize("name", ALGORITHMS)
@given(prompt=PROMPTS, cut=st.integers(0, 5))
def test_a_chain_goes_on_where_it_was_left(name: str, prompt: Prompt, cut: int) -> None:
    salt, lora, tokens = prompt
    hashes = whole(ALGORITHMS[name], prompt, 4)
    cut = min(cut, len(hashes))
    chain = Chain(4, cut, hashes[cut - 1] if cut else None, lora, salt)
    assert ALGORITHMS[name](chain, array(TOKEN, tokens[4 * cut :])) == hashes[cut:]


def test_the_largest_ids_and_many_blocks_are_hashed() -> None:
    tokens = array(TOKEN, [2**32 - 1] * 10_000)
    for hashing in ALGORITHMS.values():
        hashes = hashing(Chain(2, 0, None, None, None), tokens)
        assert len(set(hashes)) == 5000
