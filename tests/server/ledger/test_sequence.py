"""The verdict on each numbered batch, against a list of what was taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from server.ledger import sequence
from server.ledger.sequence import Sequence, Verdict

steps = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2), st.booleans()), max_size=40)


@given(steps)
def test_it_remembers_what_it_took(happened: list[tuple[int, int, bool]]) -> None:
    known, taken = Sequence(), dict[int, bytes]()
    last = None
    for number, content, take in happened:
        payload = bytes([number, content])
        verdict = known.verdict(number, payload)
        if last is None or number > last:
            assert verdict is (Verdict.NEXT if number == (0 if last is None else last + 1) else Verdict.GAP)
        elif number in taken:
            assert verdict is (Verdict.SEEN if taken[number] == payload else Verdict.RESTARTED)
        else:
            assert verdict is Verdict.OLD
        if take and verdict in (Verdict.NEXT, Verdict.GAP):
            if verdict is Verdict.GAP:
                taken.clear()
            known.take(number, payload)
            taken[number], last = payload, number
        assert known.last == last


def test_only_the_last_ones_are_remembered() -> None:
    known = Sequence()
    for number in range(sequence.RING + 5):
        known.take(number, b"%d" % number)
    assert known.verdict(4, b"4") is Verdict.OLD
    assert known.verdict(5, b"5") is Verdict.SEEN
    assert known.verdict(5, b"other") is Verdict.RESTARTED


def test_the_first_batch_follows_nothing() -> None:
    known = Sequence()
    known.begin()
    assert known.verdict(0, b"") is Verdict.NEXT
    assert known.verdict(1, b"") is Verdict.GAP
    known.take(0, b"")
    known.reset()
    assert known.verdict(0, b"other") is Verdict.NEXT
