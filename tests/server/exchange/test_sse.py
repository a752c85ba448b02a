"""However a stream's bytes are cut, the same events come out, and together they are the same bytes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.exchange.sse import EventBuffer, border, events

NEWLINES = st.sampled_from([b"\n", b"\r\n"])
TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=30),
    st.sampled_from(["[DONE]", "data: [DONE]", r'{"content":"a\n\ndata: [DONE]\n\n"}', "ü€😀" * 5, "", ":"]),
)
EVENTS = st.lists(st.tuples(st.lists(TEXTS, min_size=1, max_size=3), NEWLINES), max_size=8)


def encode(stream: list[tuple[list[str], bytes]]) -> list[bytes]:
    return [b"".join(b"data: " + t.encode() + newline for t in texts) + newline for texts, newline in stream]


def cut(data: bytes, at: list[int]) -> list[bytes]:
    borders = sorted({0, len(data), *(n % (len(data) + 1) for n in at)})
    return [data[a:b] for a, b in itertools.pairwise(borders)]


@given(EVENTS, st.lists(st.integers(0, 10_000), max_size=40), st.binary(max_size=10))
def test_any_chunking_gives_the_same_events(stream: list[tuple[list[str], bytes]], at: list[int], tail: bytes) -> None:
    tail = tail.replace(b"\n", b"")  # an event that is not finished
    encoded = encode(stream)
    data = b"".join(encoded) + tail
    buffer = EventBuffer()
    given_on = [buffer.take(piece) for piece in cut(data, at)]
    assert b"".join(given_on) == b"".join(encoded)
    assert buffer.rest == tail
    found = [event for whole in given_on for event in events(whole)]
    assert found == ["\n".join(texts).encode() for texts, _ in stream]


@given(EVENTS)
def test_one_byte_a_time_gives_each_event_when_its_last_byte_comes(stream: list[tuple[list[str], bytes]]) -> None:
    encoded = encode(stream)
    buffer = EventBuffer()
    got = [(n, whole) for n, byte in enumerate(b"".join(encoded)) if (whole := buffer.take(bytes([byte])))]
    ends = list(itertools.accumulate(len(e) for e in encoded))
    assert got == [(end - 1, e) for end, e in zip(ends, encoded, strict=True)]


def test_done_inside_content_is_no_end() -> None:
    data = b'data: {"content":"data: [DONE]\\n\\n"}\n\ndata: [DONE]\n\n'
    assert list(events(data)) == [b'{"content":"data: [DONE]\\n\\n"}', b"[DONE]"]


def test_comments_names_and_ids_are_no_data() -> None:
    assert list(events(b": ping\n\nevent: x\nid: 1\ndata:a\ndata: b\n\n")) == [b"a\nb"]


@pytest.mark.parametrize(
    ("data", "end"), [(b"", 0), (b"a\n", 0), (b"a\n\n", 3), (b"a\r\n\r\n", 5), (b"a\n\nb", 3), (b"\n\n\n", 3)]
)
def test_border(data: bytes, end: int) -> None:
    assert border(data) == end


def test_an_event_without_end_does_not_fill_the_memory() -> None:
    buffer = EventBuffer(limit=1000)
    buffer.take(b"data: " + b"x" * 900)
    with pytest.raises(OverflowError):
        buffer.take(b"x" * 100)
