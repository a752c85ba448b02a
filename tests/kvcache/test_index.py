"""The index against a dumb model: what is stored, removed, cleared and matched."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import spelling
from kvcache.copies import CPU, GPU, STORAGE, Group
from kvcache.index import PrefixIndex
from tests.kvcache.model import BLOCK, Model, Tokens, blocks, check, engine_hash, text

REPLICAS = ("a", "b", "c")
NAMESPACES = (None, "salted")
TIERS = (GPU, CPU, STORAGE)

prompts = st.lists(st.integers(0, 2), min_size=0, max_size=9).map(tuple)
replicas, namespaces, tiers = st.sampled_from(REPLICAS), st.sampled_from(NAMESPACES), st.sampled_from(TIERS)
events = st.lists(
    st.one_of(
        st.tuples(st.just("store"), replicas, namespaces, prompts, st.integers(0, 3), tiers),
        st.tuples(st.just("remove"), replicas, namespaces, prompts, st.integers(1, 4), tiers),
        st.tuples(st.just("clear"), replicas),
        st.tuples(st.just("rejoin"), replicas),
    ),
    max_size=40,
)


def store(
    index: PrefixIndex, replica: str, tokens: Tokens, first: int = 0, namespace: str | None = None, **more: Any
) -> Sequence[int]:
    """Announce the full blocks of `tokens` from number `first` on."""
    last = len(tokens) // BLOCK
    hashes = [engine_hash(namespace, tokens[: n * BLOCK]) for n in range(1, last + 1)]
    given: dict[str, Any] = {"blocks": blocks(tokens)[first:], "block_size": BLOCK, "namespace": namespace}
    index.store(replica, hashes[first:], parent=hashes[first - 1] if first else None, **given | more)
    return hashes


def fresh(blocks: int = 10_000) -> PrefixIndex:
    index = PrefixIndex()
    for replica in REPLICAS:
        index.add(replica, blocks)
    return index


@settings(max_examples=150, deadline=None)
@given(events, st.lists(st.tuples(namespaces, prompts), min_size=1, max_size=6))
def test_it_says_what_the_model_says(happened: list[Any], asked: list[tuple[str | None, Tokens]]) -> None:
    index, model = fresh(), Model()
    for replica in REPLICAS:
        model.clear(replica)
    for kind, replica, *rest in happened:
        if kind == "store":
            namespace, tokens, first, tier = rest
            first = min(first, len(tokens) // BLOCK)
            store(index, replica, tokens, first, namespace, tier=tier)
            model.store(replica, namespace, tokens, first, tier)
        elif kind == "remove":
            namespace, tokens, n, tier = rest
            index.remove(replica, [engine_hash(namespace, tokens[: n * BLOCK])], tier=tier)
            model.remove(replica, namespace, tokens[: n * BLOCK], tier)
        else:
            model.clear(replica)
            if kind == "clear":
                index.clear(replica)
            else:
                index.drop(replica)
                index.add(replica, 10_000)
    check(index)
    for replica in REPLICAS:
        assert index.counters(replica).orphans == model.orphans[replica]
        assert index.counters(replica).strays == model.strays[replica]
        assert index.uncertain(replica) == bool(model.orphans[replica])
        held = model.replicas[replica]
        assert [index.held(replica, tier) for tier in TIERS] == [sum(c[t] for c in held.values()) for t in TIERS]
    for namespace, tokens in asked + [(event[2], event[3]) for event in happened if event[0] == "store"]:
        match = index.match(text(tokens), namespace)
        expected = {replica: model.routed(replica, namespace, tokens) for replica in REPLICAS}
        assert dict(match.tokens) == {replica: n for replica, n in expected.items() if n}
        assert match.available == max(expected.values())
        for replica in REPLICAS:
            assert match.routed(replica) == expected[replica]
            assert index.tiers(match, replica) == model.tiers(replica, namespace, tokens)
            assert index.in_flight(match, replica) == 0


names = st.one_of(st.integers(0, 12), st.binary(min_size=1, max_size=1))
wild = st.lists(
    st.one_of(
        st.tuples(
            st.just("store"),
            replicas,
            st.lists(names, max_size=30),
            st.none() | names,
            st.none() | st.lists(st.sampled_from([b"", b"x", b"xy", b"xyz", b"y"]), max_size=30),
            st.sampled_from([1, 2, 4]),
            st.integers(0, 3),
            st.sampled_from(TIERS),
            st.sampled_from([Group(), Group(0, "full", 2), Group(1, "window", 2, 5), Group(2, "state", 4)]),
        ),
        st.tuples(st.just("remove"), replicas, st.lists(names, max_size=5), st.sampled_from(TIERS), st.integers(0, 2)),
        st.tuples(st.just("clear"), replicas),
        st.tuples(st.just("rejoin"), replicas),
        st.tuples(st.just("tidy"), replicas),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(wild, st.lists(st.binary(max_size=8), max_size=3))
def test_no_events_break_it_or_let_it_grow(happened: list[Any], asked: list[bytes]) -> None:
    index = fresh(4)
    index.limit = 40
    for kind, replica, *rest in happened:
        if kind == "store":
            hashes, parent, data, size, namespace, tier, group = rest
            index.store(
                replica,
                hashes,
                parent=parent,
                blocks=data,
                block_size=size,
                namespace=namespace,
                tier=tier,
                group=group,
            )
        elif kind == "remove":
            index.remove(replica, rest[0], tier=rest[1], group=rest[2])
        elif kind == "clear":
            index.clear(replica)
        elif kind == "rejoin":
            index.drop(replica)
            index.add(replica, 4)
            index.limit = 40
        else:
            index.tidy(5)
        check(index)
    for prompt in [*asked, b"xyxyz", b"xxxxxxx"]:
        match = index.match(prompt, 0)
        for replica in REPLICAS:
            assert sum(index.tiers(match, replica).values()) == match.routed(replica) <= match.available


def test_one_walk_answers_for_all_replicas() -> None:
    index = fresh()
    store(index, "a", (0, 1, 0, 1, 2, 2))
    store(index, "b", (0, 1, 0, 1))
    store(index, "c", (0, 1, 2, 2))
    match = index.match(text((0, 1, 0, 1, 2, 2, 1)))
    assert match.tokens == {"a": 6, "b": 4, "c": 2}
    assert match.available == 6
    assert [[blocks for blocks, _, _ in ends] for _, ends in match.ends] == [[1, 2, 3]]


def test_a_hole_ends_the_prefix_and_is_closed_again() -> None:
    index = fresh()
    hashes = store(index, "a", (0, 1, 0, 1, 2, 2))
    index.remove("a", [hashes[1]], now=7.0)
    assert index.match(text((0, 1, 0, 1, 2, 2))).tokens == {"a": 2}
    assert index.remembered(text((0, 1, 0, 1, 2, 2, 0))).tokens == 6
    assert index.remembered(text((0, 1, 0, 1, 2, 2, 0))).since == 7.0
    store(index, "a", (0, 1, 0, 1), first=1)
    assert index.match(text((0, 1, 0, 1, 2, 2))).tokens == {"a": 6}
    assert index.remembered(text((0, 1, 0, 1))).since is None


def test_a_second_copy_keeps_the_block() -> None:
    """vLLM does not merge equal blocks: a prompt that ends at a block's border has its last block computed again."""
    index = fresh()
    hashes = store(index, "a", (0, 1, 0, 1))
    store(index, "a", (0, 1, 0, 1), first=1)
    index.remove("a", [hashes[1]])
    assert index.match(text((0, 1, 0, 1))).tokens == {"a": 4}
    index.remove("a", [hashes[1]])
    assert index.match(text((0, 1, 0, 1))).tokens == {"a": 2}


def test_namespaces_share_nothing() -> None:
    index = fresh()
    one, other = spelling.Namespace(salt="one"), spelling.Namespace(salt="other")
    index.store("a", [1], parent=None, blocks=[text((0, 1))], block_size=BLOCK, namespace=one)
    index.store("a", [2], parent=1, blocks=[text((2, 2))], block_size=BLOCK)  # a later block's event has no salt
    assert index.match(text((0, 1, 2, 2)), one).tokens == {"a": 4}
    assert not index.match(text((0, 1, 2, 2)), other).tokens
    assert not index.match(text((0, 1, 2, 2))).tokens


def test_block_sizes_may_differ_between_replicas() -> None:
    index = fresh()
    store(index, "a", (0, 1, 0, 1, 2, 2))
    index.store("b", [b"\x01"], parent=None, blocks=[text((0, 1, 0, 1))], block_size=4)
    assert index.match(text((0, 1, 0, 1, 2, 2))).tokens == {"a": 6, "b": 4}


def test_an_unknown_parent_makes_uncertain_not_wrong() -> None:
    index = fresh()
    store(index, "a", (0, 1, 0, 1, 2, 2), first=2)
    assert not index.match(text((0, 1, 0, 1, 2, 2))).tokens
    assert index.uncertain("a")
    assert not index.uncertain("b")
    index.clear("a")
    assert not index.uncertain("a")
    index.doubt("a")
    assert index.uncertain("a")


def test_blocks_without_tokens_are_found_by_hash() -> None:
    """Offload events of older engines have no tokens."""
    index = fresh()
    hashes = store(index, "a", (0, 1, 0, 1))
    index.store("a", [hashes[1], 99], parent=None, blocks=None, block_size=0, tier=CPU)
    assert index.counters("a").unplaced == 1
    index.remove("a", [hashes[1]])
    match = index.match(text((0, 1, 0, 1)))
    assert index.tiers(match, "a") == {GPU: 2, CPU: 2}


def test_a_replica_that_never_removes_is_found_out() -> None:
    index = PrefixIndex()
    index.add("a", 64)
    for n in range(1000):
        index.store("a", [n], parent=None, blocks=[b"%d;" % n], block_size=BLOCK)
    assert index.uncertain("a")
    assert index.held("a") <= index.replicas["a"].limit
    assert index.match(b"999;").tokens == {"a": BLOCK}, "the newest are kept"
    assert not index.match(b"0;").tokens
    check(index)


def test_copies_counted_too_often_are_counted_anew() -> None:
    """Reports of reused blocks look like copies; more copies than blocks cannot be."""
    index = PrefixIndex()
    index.add("a", 64)
    for _ in range(200):
        index.store("a", [1], parent=None, blocks=[b"x"], block_size=BLOCK)
    assert index.uncertain("a")
    check(index)
    for _ in range(index.held("a")):
        index.remove("a", [1])
    assert not index.match(b"x").tokens


def test_a_dropped_replica_is_gone_at_once_and_put_away_later() -> None:
    index = PrefixIndex()
    index.add("a", 5000)
    index.add("b", 5000)
    long = (0, 1) * 4000
    store(index, "a", long)
    store(index, "b", long[:8])
    index.drop("a")
    assert index.match(text(long)).tokens == {"b": 8}
    index.add("a", 5000)
    assert index.match(text(long)).tokens == {"b": 8}
    while index.tidy(500):
        check(index, bounded=False)
    check(index)
    assert index.replicas["a"].bit | index.replicas["b"].bit == index._used


def test_many_restarts_use_up_nothing() -> None:
    index = PrefixIndex()
    index.add("a", 100)
    for _ in range(300):
        store(index, "a", (0, 1, 0, 1))
        index.clear("a")
    assert index._used.bit_length() < 8
    check(index)


@pytest.mark.parametrize("tokens", [[0], [1, 2, 3, 70_000], list(range(64))])
def test_token_ids_serve_where_text_does_not(tokens: list[int]) -> None:
    index = fresh()
    data = spelling.packed_blocks(tokens, 2)
    index.store("a", list(range(len(data))), parent=None, blocks=data, block_size=2)
    assert index.match(spelling.packed([*tokens, 5, 6])).routed("a") == len(tokens) // 2 * 2
    if len(tokens) > 2:
        assert index.match(spelling.packed([*tokens[:3], 9])).routed("a") == 2


def test_images_are_opaque() -> None:
    pad, word = b"<pad>", b"w "
    first = spelling.marked([word, pad, pad, pad], [("cat", 1)])
    second = spelling.marked([pad, pad, word, word], [("cat", -3)])
    index = fresh()
    index.store("a", [1, 2], parent=None, blocks=[b"".join(first), b"".join(second)], block_size=4)
    cat, dog = spelling.opaque("cat"), spelling.opaque("dog")
    assert index.match(word + cat * 5 + word * 2).routed("a") == 8
    assert not index.match(word + dog * 5 + word * 2).tokens
    assert not index.match(word + pad * 5 + word * 2).tokens


def test_memory_for_each_block_is_bounded() -> None:
    """Bytes for a block of 16 tokens, 64 bytes of text, with a 64-bit hash: about 330 for the first holder, 110 for others."""
    index, count = PrefixIndex(), 20_000
    index.add("a", count)
    index.add("b", count)
    data = [b"%064d" % n for n in range(count)]
    grown = []
    for replica in ("a", "b"):
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for at in range(0, count, 500):
            keys = [bytes(bytearray(key)) for key in data[at : at + 500]]
            hashes = [2**62 + n for n in range(at, at + 500)]
            index.store(replica, hashes, parent=hashes[0] - 1 if at else None, blocks=keys, block_size=16)
        del keys, hashes
        grown.append((tracemalloc.get_traced_memory()[0] - before) / count)
        tracemalloc.stop()
    print(f"{grown[0]:.0f} B for the first holder of a block, {grown[1]:.0f} B for another")
    assert grown[0] < 400
    assert grown[1] < 150
    assert index.match(b"".join(data)).tokens == {"a": 16 * count, "b": 16 * count}
