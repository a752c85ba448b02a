from __future__ import annotations

import itertools
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.outcome import ResultClass
from loadtest.reading import Dialect, StreamReading
from loadtest.sse import Event, EventParser


def data(document: Any) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"


def text(value: str, tokens: int | None = None) -> bytes:
    usage = {} if tokens is None else {"usage": {"prompt_tokens": 9, "completion_tokens": tokens}}
    return data({"choices": [{"index": 0, "text": value}], **usage})


def delta(**fields: Any) -> bytes:
    return data({"choices": [{"index": 0, "delta": fields}]})


DONE = b"data: [DONE]\n\n"


def read(pieces: list[bytes], dialect: Dialect = "completions") -> StreamReading:
    """The n-th piece comes at n x 10 ns."""
    reading = StreamReading(dialect)
    for n, piece in enumerate(pieces, start=1):
        reading.feed(piece, n * 10)
    return reading


STREAM = (
    ": a comment\r\n"
    'data: {"a": "naïve — 漢字 🙂"}\r\n\r\n'
    "data: data: [DONE]\n\n"
    "event: error\ndata: two\ndata: lines\n\n"
    "data:no space\r\r"
    "\n\ndata: [DONE]\n\n"
).encode()
EVENTS = [
    Event("message", '{"a": "naïve — 漢字 🙂"}'),
    Event("message", "data: [DONE]"),
    Event("error", "two\nlines"),
    Event("message", "no space"),
    Event("message", "[DONE]"),
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_split_of_the_bytes_gives_the_same_events(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    parser = EventParser()
    found = [e for a, b in itertools.pairwise(edges) for e in parser.feed(STREAM[a:b])]
    assert found == EVENTS
    assert [e.done for e in found] == [False, False, False, False, True]


def test_every_byte_alone() -> None:
    parser = EventParser()
    assert [e for i in range(len(STREAM)) for e in parser.feed(STREAM[i : i + 1])] == EVENTS


def test_done_inside_content_does_not_end_a_stream() -> None:
    reading = read([text("data: [DONE]"), text("[DONE]")])
    assert reading.result() is ResultClass.BROKEN_STREAM
    reading.feed(DONE, 99)
    assert reading.result() is ResultClass.OK


@pytest.mark.parametrize("empty", [delta(role="assistant", content=""), delta(content=None), delta()])
def test_chunks_without_content_are_no_first_token(empty: bytes) -> None:
    assert read([empty, delta(content="Hi"), DONE], "chat").first_ns == 20


@pytest.mark.parametrize("fields", [{"reasoning": "Hm"}, {"reasoning_content": "Hm"}, {"tool_calls": [{"index": 0}]}])
def test_reasoning_and_tool_calls_are_content(fields: dict[str, Any]) -> None:
    assert read([delta(role="assistant"), delta(**fields), DONE], "chat").first_ns == 20


def test_empty_text_is_no_first_token_of_a_completion() -> None:
    assert read([text("", 1), text("a", 2), DONE]).first_ns == 20


def test_a_chunk_of_several_tokens_is_several_gaps() -> None:
    assert read([text("a", 1), text("bcd", 4), text("e", 5), DONE]).gaps_ns() == pytest.approx((10 / 3,) * 3 + (10.0,))


def test_without_counts_only_the_mean_gap_is_known() -> None:
    usage = data({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}})
    assert read([text("ab"), text("cde"), usage, DONE]).gaps_ns() == pytest.approx((2.5,) * 4)
    assert read([text("a"), text("b"), text("c"), DONE]).gaps_ns() == (10.0, 10.0)


def test_usage_and_cached_tokens() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    reading = read([text("a"), data({"choices": [], "usage": usage}), DONE])
    assert (reading.prompt_tokens, reading.completion_tokens, reading.cached_tokens) == (9, 1, 0)
    usage["prompt_tokens_details"] = None
    assert read([text("a"), data({"choices": [], "usage": usage}), DONE]).cached_tokens is None, "unknown, never 0"


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([text("a")], ResultClass.BROKEN_STREAM),
        ([text("a"), b"data: [DONE]"], ResultClass.BROKEN_STREAM),
        ([text("a"), data({"error": {"message": "died"}}), DONE], ResultClass.STREAM_ERROR),
        ([b"event: error\n" + data({"message": "died"}), DONE], ResultClass.STREAM_ERROR),
        ([text("a"), b"data: {oops\n\n", DONE], ResultClass.STREAM_ERROR),
        ([b"data: 3\n\n", DONE], ResultClass.STREAM_ERROR),
        ([text(""), DONE], ResultClass.NO_CONTENT),
        ([DONE], ResultClass.NO_CONTENT),
        ([text("a"), DONE], ResultClass.OK),
    ],
)
def test_how_a_stream_ends(pieces: list[bytes], expected: ResultClass) -> None:
    assert read(pieces).result() is expected
