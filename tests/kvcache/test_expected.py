"""Blocks of requests under way, and engines that send no events."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.expected import Expected, Ticket
from kvcache.index import PrefixIndex
from kvcache.inferred import Inferred
from tests.kvcache.model import BLOCK, Tokens, blocks, check, engine_hash, text

PROMPT: Tokens = (0, 1, 0, 1, 2, 2)
prompts = st.lists(st.integers(0, 2), max_size=9).map(tuple)


def announce(index: PrefixIndex, replica: str, tokens: Tokens) -> list[int]:
    hashes = [engine_hash("", tokens[: n * BLOCK]) for n in range(1, len(tokens) // BLOCK + 1)]
    index.store(replica, hashes, parent=None, blocks=blocks(tokens), block_size=BLOCK)
    return hashes


def two() -> tuple[PrefixIndex, Expected]:
    index = PrefixIndex()
    index.add("a", 100)
    index.add("b", 100)
    return index, Expected(index)


def test_a_twin_meets_what_its_sibling_will_have_made() -> None:
    index, expected = two()
    announce(index, "a", PROMPT[:2])
    ticket = expected.begin("a", BLOCK, deadline=10)
    expected.extend(ticket, blocks(PROMPT)[:2])
    expected.extend(ticket, blocks(PROMPT)[2:])
    assert ticket.stored == 1
    match = index.match(text(PROMPT))
    assert match.tokens == {"a": 6}
    assert index.in_flight(match, "a") == 4
    announce(index, "a", PROMPT[:4])
    match = index.match(text(PROMPT))
    assert (match.routed("a"), index.in_flight(match, "a")) == (6, 2)
    announce(index, "a", PROMPT)
    assert index.in_flight(index.match(text(PROMPT)), "a") == 0
    expected.cancel(ticket)
    assert index.match(text(PROMPT)).tokens == {"a": 6}
    check(index)


def test_a_failed_request_is_not_waited_for() -> None:
    index, expected = two()
    first, second = (expected.begin("a", BLOCK, deadline) for deadline in (10, 20))
    expected.extend(first, blocks(PROMPT))
    expected.extend(second, blocks(PROMPT)[:1])
    expected.cancel(first)
    assert index.match(text(PROMPT)).tokens == {"a": 2}, "the other one still makes its block"
    assert expected.age(15) == 0
    assert expected.age(20) == 1
    assert not index.match(text(PROMPT)).tokens
    check(index)


def test_an_announced_and_evicted_block_is_not_expected_again() -> None:
    index, expected = two()
    ticket = expected.begin("a", BLOCK, deadline=10)
    expected.extend(ticket, blocks(PROMPT))
    index.remove("a", announce(index, "a", PROMPT)[1:])
    assert index.match(text(PROMPT)).tokens == {"a": 2}
    expected.age(11)
    assert index.match(text(PROMPT)).tokens == {"a": 2}


def test_a_ticket_outlives_its_replica() -> None:
    index, expected = two()
    ticket = expected.begin("a", BLOCK, deadline=10)
    expected.extend(ticket, blocks(PROMPT)[:1])
    index.clear("a")
    expected.extend(ticket, blocks(PROMPT)[1:])
    assert not index.match(text(PROMPT)).tokens
    index.drop("a")
    expected.age(11)
    index.tidy(100)
    check(index)


def test_what_is_expected_is_bounded() -> None:
    index, expected = two()
    for n in range(200):
        ticket = expected.begin("a", BLOCK, deadline=10)
        expected.extend(ticket, [b"%d,%d" % (n, m) for m in range(50)])
    check(index)
    assert not ticket.open
    expected.age(10)
    assert not index.replicas["a"].pending
    check(index)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), prompts),
        st.tuples(st.just("cancel"), st.integers(0, 5)),
        st.tuples(st.just("announce"), prompts),
        st.tuples(st.just("remove"), prompts),
        st.tuples(st.just("clear")),
        st.tuples(st.just("finish"), st.integers(0, 5)),
        st.tuples(st.just("age")),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(steps)
def test_expected_stored_and_inferred_blocks_agree_with_a_model(happened: list[Any]) -> None:
    index = PrefixIndex()
    expected = Expected(index)
    inferred = Inferred(expected)
    inferred.add("a", 1000)
    tickets: list[tuple[Ticket, set[Tokens]]] = []
    stored: dict[Tokens, int] = {}
    kept: set[Tokens] = set()
    for now, (kind, *rest) in enumerate(happened):
        if kind == "send":
            prefixes = {rest[0][: n * BLOCK] for n in range(1, len(rest[0]) // BLOCK + 1)}
            ticket = expected.begin("a", BLOCK, deadline=now + 5)
            expected.extend(ticket, blocks(rest[0]))
            tickets.append((ticket, {p for p in prefixes if p not in stored and p not in kept}))
        elif kind in ("cancel", "finish") and tickets:
            ticket, waiting = tickets.pop(rest[0] % len(tickets))
            if kind == "cancel":
                expected.cancel(ticket)
            else:
                path = list(ticket.nodes)
                inferred.finish(ticket, 100, None, now)
                replica = index.replicas["a"]
                kept |= {prefix for prefix, node in _prefixes(path).items() if node in replica.inferred}
        elif kind == "announce":
            announce(index, "a", rest[0])
            for n in range(1, len(rest[0]) // BLOCK + 1):
                prefix = rest[0][: n * BLOCK]
                stored[prefix] = stored.get(prefix, 0) + 1
                kept.discard(prefix)
                for _, waiting in tickets:
                    waiting.discard(prefix)
        elif kind == "remove":
            index.remove("a", [engine_hash("", rest[0][: len(rest[0]) // BLOCK * BLOCK])])
            prefix = rest[0][: len(rest[0]) // BLOCK * BLOCK]
            if stored.get(prefix):
                stored[prefix] -= 1
                if not stored[prefix]:
                    del stored[prefix]
        elif kind == "clear":
            index.clear("a")
            stored, kept = {}, set()
            for _, waiting in tickets:
                waiting.clear()
        elif kind == "age":
            expected.age(now)
            tickets = [(ticket, waiting) for ticket, waiting in tickets if ticket.deadline > now]
        check(index)
        there = set(stored) | kept
        for _, waiting in tickets:
            there |= waiting
        for tokens in [step[1] for step in happened if step[0] in ("send", "announce")]:
            n = 0
            while n < len(tokens) // BLOCK and tokens[: (n + 1) * BLOCK] in there:
                n += 1
            match = index.match(text(tokens))
            assert match.routed("a") == n * BLOCK
            secure = set(stored) | kept
            m = 0
            while m < n and tokens[: (m + 1) * BLOCK] in secure:
                m += 1
            assert index.in_flight(match, "a") == (n - m) * BLOCK


def _prefixes(path: list[Any]) -> dict[Tokens, Any]:
    back = {b"a;": 0, b"bb;": 1, b"ccc;": 2}
    found: dict[Tokens, Any] = {}
    tokens: Tokens = ()
    for node in path:
        tokens += tuple(back[part + b";"] for part in node.key.split(b";") if part)
        found[tokens] = node
    return found


def send(inferred: Inferred, prompt: bytes, delivered: int | None, now: float) -> Ticket:
    """A request for a prompt of one-byte blocks of 2 tokens, to its end."""
    ticket = inferred.expected.begin("a", BLOCK, deadline=now + 60)
    inferred.expected.extend(ticket, [bytes([block]) for block in prompt], now)
    inferred.finish(ticket, len(prompt) * BLOCK, delivered, now)
    return ticket


def engine(blocks: int) -> tuple[PrefixIndex, Inferred]:
    index = PrefixIndex()
    inferred = Inferred(Expected(index))
    inferred.add("a", blocks)
    return index, inferred


def test_what_was_sent_is_inferred() -> None:
    index, inferred = engine(100)
    send(inferred, b"abcd", 0, now=0)
    match = index.match(b"abcx")
    assert match.tokens == {"a": 6}
    assert index.in_flight(match, "a") == 0
    assert index.held("a") == 4
    inferred.age(now=1199)
    assert index.match(b"abcx").tokens == {"a": 6}
    inferred.age(now=1201)
    assert not index.match(b"abcx").tokens
    check(index)


def test_the_least_recently_used_goes_first_and_ends_before_beginnings() -> None:
    index, inferred = engine(20)
    send(inferred, bytes(range(100, 110)), 0, now=0)
    send(inferred, bytes(range(120, 128)), 0, now=1)
    send(inferred, bytes(range(100, 102)), None, now=2)
    send(inferred, bytes(range(140, 144)), 0, now=3)
    assert index.match(bytes(range(100, 110))).tokens == {"a": 8 * BLOCK}
    assert index.match(bytes(range(120, 128))).tokens == {"a": 8 * BLOCK}
    assert index.held("a") == 20
    check(index)


def test_a_shortfall_shrinks_the_estimate_and_agreement_lets_it_grow() -> None:
    index, inferred = engine(100)
    for group in range(2):
        send(inferred, bytes(range(group * 40, group * 40 + 40)), 0, now=group)
    send(inferred, bytes(range(40)), 0, now=3)
    assert inferred.room("a") == 80 * 0.9
    assert index.held("a") == 72
    for n in range(30):
        send(inferred, bytes(range(40)), 78, now=4 + n)
    assert inferred.room("a") == 100
    send(inferred, bytes(range(40)), None, now=90)
    assert inferred.room("a") == 100
    check(index)


def test_an_engine_without_events_that_restarts_holds_nothing() -> None:
    index, inferred = engine(100)
    ticket = inferred.expected.begin("a", BLOCK, deadline=60)
    inferred.expected.extend(ticket, [b"x", b"y"])
    index.clear("a")
    inferred.finish(ticket, 4, 0, now=1)
    assert not index.match(b"xy").tokens
    inferred.drop("a")
    index.tidy(10)
    check(index)


def test_tickets_that_are_over_do_not_wait_for_their_deadlines() -> None:
    """Deadlines are minutes away, and requests many."""
    index, expected = two()
    standing = expected.begin("a", BLOCK, deadline=900)
    expected.extend(standing, blocks(PROMPT))
    for n in range(2000):
        ticket = expected.begin("ab"[n % 2], BLOCK, deadline=n % 800)
        expected.extend(ticket, blocks(PROMPT))
        expected.cancel(ticket)
        assert expected.tickets < 200
    assert index.in_flight(index.match(text(PROMPT)), "a") == 6
    assert expected.age(899) == 0
    assert expected.age(900) == 1
    assert (expected.tickets, index.match(text(PROMPT)).tokens) == (0, {})
