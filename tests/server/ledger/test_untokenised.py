"""What prompts share by bytes, while nobody knows their tokens."""

from hypothesis import given
from hypothesis import strategies as st

from server.ledger.untokenised import OPENING, Untokenised, common

LONG = b"x" * OPENING


@given(st.binary(max_size=40), st.binary(max_size=20), st.binary(max_size=20))
def test_common_is_the_common_prefix(start: bytes, one: bytes, other: bytes) -> None:
    length = common(start + one, start + other)
    assert (start + one)[:length] == (start + other)[:length]
    assert (start + one)[length : length + 1] != (start + other)[length : length + 1] or one == other


def test_what_is_on_its_way_is_shared_until_it_is_taken_out() -> None:
    known = Untokenised()
    first = known.add("n", LONG + b"abc1", "a")
    second = known.add("n", LONG + b"abc2", "a")
    third = known.add("n", LONG + b"ab", "b")
    assert known.shared("n", LONG + b"abc2") == {"a": OPENING + 4, "b": OPENING + 2}
    known.remove(second)
    assert known.shared("n", LONG + b"abc2") == {"a": OPENING + 3, "b": OPENING + 2}
    known.remove(first)
    known.remove(third)
    known.remove(third)
    assert known.shared("n", LONG + b"abc2") == {}
    assert not known._prompts


def test_worlds_and_openings_are_apart() -> None:
    known = Untokenised()
    known.add("n", LONG + b"abc", "a")
    assert known.shared("m", LONG + b"abc") == {}
    assert known.shared("n", b"y" + LONG) == {}
