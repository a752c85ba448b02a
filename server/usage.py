"""What an engine's answer says of tokens, in each dialect. Unknown stays None, never 0."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import orjson

# Structural: inside a JSON string the quotes would be escaped, so text that a model writes can never match. Its objects
# nest once, and no name in them holds a brace.
USAGE = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
_NAME = b'"usage"'
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_EVENT = re.compile(rb".*?\n\r?\n", re.DOTALL)


class Usage(NamedTuple):
    """Tokens of one request as the engine reports them; None is unknown. `prompt` is all of it, the cached part included."""

    prompt: int | None
    output: int | None
    cached: int | None


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def read_usage(data: bytes) -> Usage | None:
    """The last usage object in `data` (a JSON answer or events of a stream), or None if there is none that can be read."""
    at = data.rfind(_NAME)
    while at >= 0 and (found := USAGE.match(data, at)) is None:  # "usage": null
        at = data.rfind(_NAME, 0, at)
    if at < 0 or found is None:
        return None
    try:
        usage = orjson.loads(found[1])
    except orjson.JSONDecodeError:
        return None
    return _openai(usage) if "prompt_tokens" in usage else _input_tokens(usage)


def _openai(usage: dict[str, Any]) -> Usage:
    """Chat, completions, embeddings."""
    details = usage.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    return Usage(_count(usage["prompt_tokens"]), _count(usage.get("completion_tokens")), cached)


def _input_tokens(usage: dict[str, Any]) -> Usage:
    """OpenAI's responses count the cached tokens within the input, Anthropic's messages beside it."""
    given, output = _count(usage.get("input_tokens")), _count(usage.get("output_tokens"))
    details = usage.get("input_tokens_details")
    if isinstance(details, dict):
        return Usage(given, output, _count(details.get("cached_tokens")))
    read = _count(usage.get("cache_read_input_tokens"))
    written = _count(usage.get("cache_creation_input_tokens"))
    total = None if given is None else given + (read or 0) + (written or 0)
    return Usage(total, output, read)


def without_usage(events: bytes) -> bytes:
    """Whole events less those that bring usage and nothing else: chunks that the gateway asked for, not the client."""
    if not _NO_CHOICES.search(events):
        return events
    return b"".join(
        event for event in _EVENT.findall(events) if not (_NO_CHOICES.search(event) and USAGE.search(event))
    )


def has_content(data: bytes) -> bool:
    """Whether an event's data brings generated content: text, reasoning or a tool call. A role alone is none."""
    try:
        message = orjson.loads(data)
    except orjson.JSONDecodeError:
        return False
    if not isinstance(message, dict):
        return False
    choices = message.get("choices")
    if isinstance(choices, list):
        return any(isinstance(choice, dict) and _choice_has_content(choice) for choice in choices)
    # responses: {"type": "response.output_text.delta", "delta": "..."}; messages: {"delta": {"text": "..."}}
    delta = message.get("delta")
    if isinstance(delta, dict):
        return bool(delta.get("text") or delta.get("thinking") or delta.get("partial_json"))
    return bool(delta) and str(message.get("type", "")).endswith(".delta")


def _choice_has_content(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return bool(choice.get("text"))
    return bool(
        delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content") or delta.get("tool_calls")
    )
