"""What is read of an engine's answer, and what is left unknown."""

import orjson
import pytest

from server.usage import Usage, has_content, read_usage, without_usage


def answer(usage: object, text: str = "hi") -> bytes:
    return orjson.dumps({"choices": [{"message": {"content": text}}], "usage": usage})


def test_the_tokens_of_an_answer() -> None:
    usage = {"prompt_tokens": 70, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 64}}
    assert read_usage(answer(usage)) == Usage(prompt=70, output=3, cached=64)


@pytest.mark.parametrize(
    "details", [None, {}, {"cached_tokens": None}, {"cached_tokens": -1}, {"cached_tokens": True}, 3]
)
def test_what_is_not_said_is_unknown_and_not_zero(details: object) -> None:
    usage = read_usage(answer({"prompt_tokens": 70, "completion_tokens": 3, "prompt_tokens_details": details}))
    assert usage == Usage(prompt=70, output=3, cached=None)


@pytest.mark.parametrize("body", [b"", b"{}", answer(None), b'{"usage": {"prompt', b'{"usage":[]}', b"\xff\xfe"])
def test_no_usage_is_none(body: bytes) -> None:
    assert read_usage(body) is None


def test_text_that_looks_like_usage_is_not_taken_for_it() -> None:
    fake = '"usage":{"prompt_tokens":9999}'
    assert read_usage(answer(None, fake)) is None
    assert read_usage(answer({"prompt_tokens": 5}, fake)) == Usage(5, None, None)
    behind = orjson.dumps({"usage": {"prompt_tokens": 5}, "choices": [fake], "metadata": {"note": fake}})
    assert read_usage(behind) == Usage(5, None, None)


def test_the_last_usage_of_a_stream_counts() -> None:
    events = b"".join(b"data: " + answer(u) + b"\n\n" for u in ({"prompt_tokens": 1}, {"prompt_tokens": 2}, None))
    assert read_usage(events) == Usage(2, None, None)


@pytest.mark.parametrize(
    ("choice", "content"),
    [
        ({"delta": {"role": "assistant", "content": ""}}, False),
        ({"delta": {"role": "assistant"}}, False),
        ({"delta": {"content": "x"}}, True),
        ({"delta": {"reasoning": "x"}}, True),
        ({"delta": {"reasoning_content": "x"}}, True),
        ({"delta": {"tool_calls": [{"index": 0}]}}, True),
        ({"delta": {}, "finish_reason": "stop"}, False),
        ({"text": "x"}, True),
        ({"text": ""}, False),
        (None, False),
    ],
)
def test_first_content(choice: object, content: bool) -> None:
    assert has_content(orjson.dumps({"choices": [choice]})) is content


@pytest.mark.parametrize("data", [b"[DONE]", b"", b"[]", b'{"choices":[]}', b'{"choices":{}}', b"{"])
def test_what_is_no_chunk_has_no_content(data: bytes) -> None:
    assert not has_content(data)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}, Usage(9, 2, 4)),
        ({"input_tokens": 9, "output_tokens": 2}, Usage(9, 2, None)),
        ({"input_tokens": 9, "cache_read_input_tokens": 4, "output_tokens": 2}, Usage(13, 2, 4)),
        ({"input_tokens": 9, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 3}, Usage(12, None, 0)),
        ({}, Usage(None, None, None)),
    ],
)
def test_input_tokens(usage: object, expected: Usage) -> None:
    """Inclusive in OpenAI's responses, exclusive in Anthropic's messages."""
    assert read_usage(orjson.dumps({"usage": usage})) == expected


def test_only_chunks_without_choices_are_taken_for_usage_chunks() -> None:
    kept = (
        b'data: {"choices":[{"delta":{"content":"\\"choices\\":[] \\"usage\\":{}"}}],"usage":{"prompt_tokens":1}}\n\n'
    )
    gone = b'data: {"id":"x","choices": [ ],"usage":{"prompt_tokens":1}}\n\n'
    odd = b'data: {"choices":[],"note":"no usage"}\n\n'
    done = b"data: [DONE]\n\n"
    assert without_usage(kept + gone + odd + done) == kept + odd + done
    assert without_usage(kept + done) == kept + done
    assert without_usage(gone) == b""


@pytest.mark.parametrize(
    ("event", "content"),
    [
        ({"type": "response.output_text.delta", "delta": "x"}, True),
        ({"type": "response.reasoning_text.delta", "delta": "x"}, True),
        ({"type": "response.created", "response": {}}, False),
        ({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x"}}, True),
        ({"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "x"}}, True),
        ({"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}}, True),
        ({"type": "content_block_delta", "delta": {"type": "text_delta", "text": ""}}, False),
        ({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, False),
        ({"type": "message_start", "message": {"content": []}}, False),
    ],
)
def test_first_content_of_the_other_streams(event: object, content: bool) -> None:
    assert has_content(orjson.dumps(event)) is content
