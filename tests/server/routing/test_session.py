"""The policy `session`: conversations stay where they are, as far as the load allows."""

import pytest

from server.routing.asked import Asked
from server.routing.session import BOUND, SessionPolicy, session_of
from tests.server.routing.fleet import replica


def names(count: int) -> list[bytes]:
    return [b"session-%d" % n for n in range(count)]


def test_a_session_stays_with_its_replica() -> None:
    fleet = [replica(n) for n in range(1, 6)]
    choose = SessionPolicy().choose
    for name in names(20):
        assert len({choose(fleet, Asked(session=name)).name for _ in range(5)}) == 1


def test_sessions_are_spread() -> None:
    fleet = [replica(n) for n in range(1, 5)]
    chosen = [SessionPolicy().choose(fleet, Asked(session=name)).name for name in names(400)]
    assert all(60 <= chosen.count(r.name) <= 140 for r in fleet)


def test_only_the_sessions_of_a_lost_replica_move() -> None:
    fleet = [replica(n) for n in range(1, 6)]
    choose = SessionPolicy().choose
    before = {name: choose(fleet, Asked(session=name)) for name in names(200)}
    lost = fleet[2]
    left = [r for r in fleet if r is not lost]
    moved = [name for name, was in before.items() if choose(left, Asked(session=name)) is not was]
    assert set(moved) == {name for name, was in before.items() if was is lost}


def test_no_replica_gets_far_more_than_its_share() -> None:
    fleet = [replica(n) for n in range(1, 5)]
    choose = SessionPolicy().choose
    for _ in range(100):  # one busy session, none of whose requests ends
        choose(fleet, Asked(session=b"busy")).inflight += 1
    assert max(r.inflight for r in fleet) <= BOUND * 101 / 4


def test_without_a_session_the_least_loaded_is_taken_in_turn() -> None:
    fleet = [replica(1, inflight=2), replica(2), replica(3)]
    choose = SessionPolicy().choose
    chosen = [choose(fleet, Asked()).name for _ in range(10)]
    assert [chosen.count(r.name) for r in fleet] == [0, 5, 5]


@pytest.mark.parametrize(
    ("headers", "fields", "session"),
    [
        ([(b"x-session-id", b"h")], {"prompt_cache_key": "k", "user": "u"}, b"k"),
        ([(b"x-session-id", b"h")], {"prompt_cache_key": "", "user": "u"}, b"h"),
        ([(b"x-session-id", b"")], {"user": "u"}, b"u"),
        ([], {"metadata": {"user_id": "a"}}, b"a"),
        ([], {"metadata": {"user_id": 3}, "user": None}, b""),
        ([], {"prompt_cache_key": 7, "metadata": "m"}, b""),
        ([], {"user": "\ud800"}, b"?"),
    ],
)
def test_what_names_a_session(headers: list[tuple[bytes, bytes]], fields: dict[str, object], session: bytes) -> None:
    assert session_of(headers, fields) == session
