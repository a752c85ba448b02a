"""OpenAI's chat messages as vLLM hands them to the chat template.

vLLM's request model first puts known fields in its own order and keeps unknown ones behind them, which templates that print
whole objects show; then content becomes one string or a list of parts, as the template takes it, tool arguments become objects,
and developer messages become system messages where the template knows none. Nothing of the request is changed: every message is
a new one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from llm.anthropic import BILLING_HEADER
from llm.content_format import ContentFormat
from llm.prompt import NotRendered

Message = dict[str, Any]
Part = dict[str, Any]

_TEXT_FIELD = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# what a form of message in vLLM's request model names; lists of nothing else are refused
_NAMED_PARTS = (
    "text",
    "refusal",
    "thinking",
    "tool_reference",
    "image_url",
    "input_audio",
    "audio_url",
    "video_url",
    "file",
)
# fields of parts that are not handed on
_PART_FIELDS = frozenset(
    ("type", "text", "refusal", "thinking", "closed", "name", "uuid", "data", "file", "prompt_cache_breakpoint")
) | {"image_pil", "image_url", "input_audio", "audio_url", "video_url", "image_embeds", "audio_embeds", "video_embeds"}
_MEDIA = {
    "image_url": "image",
    "input_image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
}


class Item(NamedTuple):
    """An image, sound or video: what it is, and a key for its content."""

    kind: str
    key: str


def conversation(
    messages: Sequence[Any], form: ContentFormat, *, items: list[Item] | None = None, checked: bool = True
) -> list[Message]:
    """The messages for a template that takes `form`. Raises NotRendered.

    items: where media go, in order; None refuses them. checked: the messages are a chat request's, so what its request model
    refuses or drops is refused or dropped here; those of the Responses API are not.
    """
    return [_message(message, form, items, checked) for message in messages]


def without_developer(messages: list[Message]) -> list[Message]:
    """Developer messages as system messages; of several system messages, or one that is not first, one at the beginning."""
    turned = [
        {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    places = [at for at, message in enumerate(turned) if message["role"] == "system"]
    if places in ([], [0]):
        return turned
    texts = [_joined(message.get("content", "")) for message in turned if message["role"] == "system"]
    rest = [message for message in turned if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *rest]


def _joined(content: str | list[Part]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if "text" in part)


def _message(message: object, form: ContentFormat, items: list[Item] | None, checked: bool) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise NotRendered("invalid")
    role = message["role"]
    reasoning = message.get("reasoning")
    if checked:
        _refuse(message, role)
        if reasoning is None:
            reasoning = message.get("reasoning_content")
    made: Message = {"role": role, "content": _content(message.get("content"), role, form, items)}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            made["tool_calls"] = [_call(call, checked) for call in calls]
        if reasoning is not None:
            made["reasoning"] = made["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            made["tool_call_id"] = message["tool_call_id"]
        if not isinstance(made["content"], str) and all(part["type"] == "text" for part in made["content"]):
            made["content"] = "\n".join(part["text"] for part in made["content"])
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            made[key] = message[key]
    if role == "developer":
        made["tools"] = None if message.get("tools") is None else [_developer_tool(tool) for tool in message["tools"]]
    return made


def _refuse(message: Mapping[str, Any], role: str) -> None:
    """What no form of vLLM's request model takes."""
    content = message.get("content", "")
    if content is None and role not in ("assistant", "function"):
        raise NotRendered("invalid")
    if isinstance(content, list) and content and not any(_is_named(part) for part in content):
        raise NotRendered("invalid")
    if not isinstance(message.get("name", ""), str) or not isinstance(message.get("tool_call_id"), str | None):
        raise NotRendered("invalid")
    if not (isinstance(message.get("tool_calls"), list | None) and isinstance(message.get("tools"), list | None)):
        raise NotRendered("invalid")
    if content is None and message.get("tool_calls", ()) is None:
        raise NotRendered("invalid")


def _is_named(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in _NAMED_PARTS and not _is_void(part)


def _content(content: object, role: str, form: ContentFormat, items: list[Item] | None) -> str | list[Part]:
    if content is None:
        content = []
    elif isinstance(content, str):
        content = [{"type": "text", "text": content}]
    elif not isinstance(content, list):
        raise NotRendered("invalid")
    parts = _without_billing(content) if role == "system" else content
    made = [_part(part, items) for part in parts if not _is_void(part)]
    if form == "openai":
        return made
    if any(part["type"] not in ("text", "tool_reference") for part in made):
        raise NotRendered("media")  # vLLM puts the model's own placeholder somewhere into the text
    texts = [part["text"] if part["type"] == "text" else part["name"] for part in made]
    return "\n".join(filter(None, texts))  # an empty part leaves no empty line


def _is_void(part: object) -> bool:
    """Text that is not there; vLLM passes over it."""
    return isinstance(part, dict) and part.get("type") in ("text", "refusal") and part.get(part["type"]) is None


def _without_billing(parts: Sequence[Any]) -> list[Any]:
    """Without Claude Code's billing line, which changes with every request."""
    kept: list[Any] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not (isinstance(text, str) and text.startswith(BILLING_HEADER)):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(rest if isinstance(part, str) else part | {"text": rest})
    return kept


def _part(part: object, items: list[Item] | None) -> Part:
    """As a template for OpenAI's form sees it."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise NotRendered("invalid")
    kind = part.get("type")
    if not isinstance(kind, str):
        raise NotRendered("invalid")
    if kind in _MEDIA:
        if items is None:
            raise NotRendered("media")
        items.append(Item(_MEDIA[kind], _key(part, kind)))
        made = {"type": _MEDIA[kind]}
    elif kind in _TEXT_FIELD:
        text = part.get(_TEXT_FIELD[kind])
        if not isinstance(text, str) or part.get("uuid") is not None:
            raise NotRendered("invalid")
        made = {"type": "text", "text": text}
    elif kind == "tool_reference" and isinstance(part.get("name"), str):
        return {"type": "tool_reference", "name": part["name"]}
    else:
        raise NotRendered("media" if "embeds" in kind else "invalid")
    if len(part) > 2:
        made.update((key, value) for key, value in part.items() if key not in _PART_FIELDS)
    return made


def _key(part: Part, kind: str) -> str:
    """Equal for equal content, as far as the request tells: the client's own name for it, its address or its data."""
    content = part.get("uuid")
    if content is None:
        content = part.get("image_url" if kind == "input_image" else kind)
        if isinstance(content, dict) and "url" in content:
            content = content["url"]
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    return blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()


def _call(call: object, checked: bool) -> dict[str, Any]:
    """With its arguments as an object; what is none counts as empty. The order of fields is vLLM's, which templates may print."""
    function = call.get("function") if isinstance(call, dict) and call.get("type") == "function" else None
    if not (isinstance(call, dict) and isinstance(call.get("id"), str) and isinstance(function, dict)):
        raise NotRendered("invalid")
    name, text = function.get("name"), function.get("arguments")
    if not (isinstance(name, str) and isinstance(text, str)):
        raise NotRendered("invalid")
    try:
        parsed = json.loads(text) if text else {}
    except ValueError:
        parsed = {}
    arguments = parsed if isinstance(parsed, dict) else {}
    made = {"arguments": arguments, "name": name} if checked else {"name": name, "arguments": arguments}
    return _ordered(call, {"id": call["id"], "function": _ordered(function, made), "type": "function"})


def _ordered(given: Mapping[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """The known fields, and whatever else is given behind them."""
    known.update((key, value) for key, value in given.items() if key not in known)
    return known


def _developer_tool(tool: object) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not (isinstance(tool, dict) and isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise NotRendered("invalid")
    kept = {key: function[key] for key in ("name", "description", "parameters", "strict") if key in function}
    return _ordered(tool, {"function": _ordered(function, kept), "type": "function"})
