"""What an engine's answer says of tokens. Unknown stays None, never 0."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import orjson

# Structural: inside a JSON string the quotes would be escaped, so text that a model writes can never match.
USAGE = re.compile(
    rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})'
)  # its objects nest once, its strings hold no braces
_NAME = b'"usage"'


class Usage(NamedTuple):
    """Tokens of one request as the engine reports them; None is unknown."""

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
    details = usage.get("prompt_tokens_details")
    return Usage(
        prompt=_count(usage.get("prompt_tokens")),
        output=_count(usage.get("completion_tokens")),
        cached=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
    )


def has_content(data: bytes) -> bool:
    """Whether an event's data brings generated content: text, reasoning or a tool call. A role alone is none."""
    try:
        message = orjson.loads(data)
    except orjson.JSONDecodeError:
        return False
    choices = message.get("choices") if isinstance(message, dict) else None
    if not isinstance(choices, list):
        return False
    for choice in choices:
        if not isinstance(choice, dict):
            continue
        if choice.get("text"):
            return True
        delta = choice.get("delta")
        if isinstance(delta, dict) and (
            delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content") or delta.get("tool_calls")
        ):
            return True
    return False
