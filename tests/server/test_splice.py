"""Splicing changes the members that are meant, in the bytes as they came, and nothing else."""

import json

import orjson
from hypothesis import given
from hypothesis import strategies as st

from server.splice import Member, apply, ask_for_usage, members, set_members

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
    st.sampled_from(['"', "\\", "{", "}]", '","cache_salt":"x', "a\\\\", "\u0000", "ü€😀"]),
)
VALUES = st.recursive(
    SCALARS, lambda c: st.lists(c, max_size=4) | st.dictionaries(st.text(max_size=5), c, max_size=4), max_leaves=15
)
NAMES = st.one_of(st.text(max_size=8), st.sampled_from(["model", "cache_salt", "stream_options", "messages", 'a"b']))
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=6)
WRITERS = st.sampled_from(
    [
        orjson.dumps,
        lambda o: json.dumps(o).encode(),
        lambda o: json.dumps(o, indent=3).encode(),
        lambda o: json.dumps(o, separators=(" ,\t", "\r\n :")).encode(),
        lambda o: b" \n" + json.dumps(o, ensure_ascii=False).encode("utf-8", "replace") + b"\n ",
    ]
)


def readable(value: object) -> bool:
    try:
        orjson.loads(json.dumps(value))
        orjson.dumps(value)
    except (orjson.JSONDecodeError, TypeError):  # lone surrogates, numbers beyond 64 bits
        return False
    return True


@given(OBJECTS.filter(readable), WRITERS)
def test_members_are_those_of_the_object(value: dict[str, object], write) -> None:  # type: ignore[no-untyped-def]
    body = write(value)
    assert {m.name: orjson.loads(body[m.start : m.end]) for m in members(body)} == orjson.loads(body)


@given(OBJECTS.filter(readable), WRITERS)
def test_setting_changes_these_members_and_no_other(value: dict[str, object], write) -> None:  # type: ignore[no-untyped-def]
    body = write(value)
    changed = apply(body, set_members(body, {"cache_salt": b'"s"', "model": b"[1]"}))
    assert orjson.loads(changed) == {**orjson.loads(body), "cache_salt": "s", "model": [1]}
    for member in members(body):  # every other value is there byte for byte
        if member.name not in ("cache_salt", "model"):
            assert body[member.start : member.end] in changed
    only = apply(body, set_members(body, {"cache_salt": b"null"}, insert=False))
    expected = orjson.loads(body)
    assert orjson.loads(only) == ({**expected, "cache_salt": None} if "cache_salt" in expected else expected)


@given(OBJECTS.filter(readable), WRITERS, st.none() | st.booleans() | OBJECTS.filter(readable))
def test_usage_is_asked_for_whatever_the_options_were(value, write, options) -> None:  # type: ignore[no-untyped-def]
    body = write({**value, "stream_options": options})
    asked = orjson.loads(apply(body, ask_for_usage(body)))
    kept = options if isinstance(options, dict) else {}
    assert asked == {**orjson.loads(write(value)), "stream_options": {**kept, "include_usage": True}}
    without = write({k: v for k, v in value.items() if k != "stream_options"})
    assert orjson.loads(apply(without, ask_for_usage(without)))["stream_options"] == {"include_usage": True}


def test_an_escaped_or_repeated_name_is_the_same_name() -> None:
    body = rb'{"cache\u005fsalt":"mine", "model":"m", "cache_salt" : "other"}'
    assert apply(body, set_members(body, {"cache_salt": b'"ours"'})) == (
        rb'{"cache\u005fsalt":"ours", "model":"m", "cache_salt" : "ours"}'
    )


def test_a_name_inside_a_value_is_no_member() -> None:
    body = b'{"messages":[{"cache_salt":"x","content":"\\"cache_salt\\":\\"y\\""}],"n":1}'
    assert [m.name for m in members(body)] == ["messages", "n"]
    assert apply(body, set_members(body, {"cache_salt": b'"s"'})) == body[:-1] + b',"cache_salt":"s"}'


def test_an_empty_object() -> None:
    assert list(members(b" { } ")) == []
    assert apply(b"{}", set_members(b"{}", {"a": b"1"})) == b'{"a":1}'


def test_a_long_array_of_numbers_is_one_value() -> None:
    body = b'{"prompt":[' + b",".join(b"%d" % n for n in range(50_000)) + b'],"model":"m"}'
    assert [m.name for m in members(body)] == ["prompt", "model"]
    assert list(members(body))[1] == Member("model", len(body) - 4, len(body) - 1)
