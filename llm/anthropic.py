"""Anthropic's Messages as the chat request that vLLM makes of them, before it renders that like any other.

Follows vLLM 0.32 to the letter, oddities included: system blocks are joined without a separator, a tool's result becomes a
message of its own in front of the rest of its turn, the text of several blocks is joined by newlines where the template takes
strings, `cache_control` has no effect, and Claude Code's billing header is dropped, since it changes with every request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llm.prompt import NotRendered

Body = Mapping[str, Any]
Message = dict[str, Any]

BILLING_HEADER = "x-anthropic-billing-header"
_BLOCKS = (
    "text",
    "image",
    "tool_use",
    "tool_result",
    "tool_reference",
    "thinking",
    "redacted_thinking",
    "tool_addition",
    "tool_removal",
)
_TOOL_CHANGES = ("tool_addition", "tool_removal")
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


def merges_system(source: str) -> bool:
    """Whether vLLM moves system messages from inside a conversation to its beginning: it does where the template fails when
    there is one after the first turn. Tried as vLLM tries it, without the functions that templates usually have."""
    try:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        turns = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
        environment.from_string(source).render(messages=turns, add_generation_prompt=False)
    except Exception:  # noqa: BLE001 - a template may raise anything; each means that it does not take such a conversation
        return True
    return False


def chat_request(body: Body, *, merge_system: bool, disabled_effort: str) -> dict[str, Any]:
    """The chat request for `body`, of /v1/messages or count_tokens. Raises NotRendered.

    merge_system: as from `merges_system`. disabled_effort: what `thinking: {"type": "disabled"}` becomes, "none" or "low".
    Keys that are not set are left out; `tool_choice` is "none" only where the request says so.
    """
    turns = [_turn(message) for message in _list(body.get("messages"))]
    messages: list[Message] = []
    _add_system(body.get("system"), turns if merge_system else (), messages)
    for role, content in turns:
        if role != "system":
            _add_turn(role, content, messages)
        elif not merge_system and (text := _system_text(content)):
            messages.append({"role": "system", "content": text})
    request: dict[str, Any] = {"messages": messages}
    for key in ("cache_salt", "chat_template_kwargs", "kv_transfer_params"):
        if body.get(key) is not None:
            request[key] = body[key]
    if (effort := _effort(body, disabled_effort)) is not None:
        request["reasoning_effort"] = effort
    if (tools := _tools(body.get("tools"), turns)) is not None:
        request["tools"] = [_function(tool) for tool in tools]
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") == "none":
        request["tool_choice"] = "none"
    return request


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise NotRendered("invalid")
    return value


def _blocks(content: object) -> list[dict[str, Any]]:
    blocks = _list(content)
    if not all(isinstance(block, dict) and block.get("type") in _BLOCKS for block in blocks):
        raise NotRendered("invalid")
    return blocks


def _text(value: object) -> str:
    """Of a field that is text or not there."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise NotRendered("invalid")
    return value


def _turn(message: object) -> tuple[str, str | list[dict[str, Any]]]:
    """(role, text or blocks)."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise NotRendered("invalid")
    content = message.get("content")
    blocks = content if isinstance(content, str) else _blocks(content)
    if message["role"] != "system" and not isinstance(blocks, str):
        _no_tool_changes(blocks)
    return message["role"], blocks


def _no_tool_changes(blocks: Sequence[dict[str, Any]]) -> None:
    if any(block["type"] in _TOOL_CHANGES for block in blocks):
        raise NotRendered("invalid")


def _add_system(system: object, merged: Sequence[tuple[str, Any]], messages: list[Message]) -> None:
    """The system message, with those of `merged` turns behind it."""
    parts: list[str] = []
    if isinstance(system, str):
        parts.append(system)  # a header in a plain string stays until the chat request drops it
    elif system is not None:
        blocks = _blocks(system)
        _no_tool_changes(blocks)
        parts.append(_system_text(blocks))
    parts += [_system_text(content) for role, content in merged if role == "system"]
    if any(parts):
        messages.append({"role": "system", "content": "".join(parts)})


def _system_text(content: str | list[dict[str, Any]]) -> str:
    texts = [content] if isinstance(content, str) else [_text(b.get("text")) for b in content if b["type"] == "text"]
    return "".join(text for text in texts if not text.startswith(BILLING_HEADER))


def _add_turn(role: str, content: str | list[dict[str, Any]], messages: list[Message]) -> None:
    """The turn as a message, behind those that its tool results become."""
    message: Message = {"role": role}
    if isinstance(content, str):
        message["content"] = content
    else:
        parts: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        thoughts: list[str] = []
        for block in content:
            kind = block["type"]
            if kind == "text" and (text := _text(block.get("text"))):
                parts.append({"type": "text", "text": text})
            elif kind == "image" and block.get("source"):
                parts.append(_image(block["source"]))
            elif kind == "thinking" and block.get("thinking") is not None:
                thoughts.append(_text(block["thinking"]))
            elif kind == "tool_use":
                calls.append(_call(block))
            elif kind == "tool_result" and role == "user":
                _add_tool_result(block, messages)
            elif kind == "tool_result":
                parts.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
        if thoughts:
            message["reasoning"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        if len(parts) == 1 and parts[0]["type"] == "text":
            message["content"] = parts[0]["text"]
        elif parts:
            message["content"] = parts
    if role != "user" or "content" in message:
        messages.append(message)


def _image(source: object) -> dict[str, Any]:
    if not isinstance(source, dict):
        raise NotRendered("invalid")
    if source.get("type") == "url":
        url = source.get("url", "")
    else:
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _call(block: dict[str, Any]) -> dict[str, Any]:
    arguments = block.get("input")
    if arguments is not None and not isinstance(arguments, dict):
        raise NotRendered("invalid")
    function = {"name": _text(block.get("name")), "arguments": json.dumps(arguments or {})}
    if not block.get("id"):
        raise NotRendered("invalid")  # vLLM makes an id from the clock, which a template may print
    return {"id": _text(block["id"]), "type": "function", "function": function}


def _add_tool_result(block: dict[str, Any], messages: list[Message]) -> None:
    content = block.get("content")
    texts: list[str] = []
    images: list[dict[str, Any]] = []
    references: list[dict[str, Any]] = []
    if isinstance(content, str):
        texts.append(content)
    elif content is not None:
        for item in _list(content):
            if not isinstance(item, dict):
                raise NotRendered("invalid")
            if item.get("type") == "text":
                texts.append(_text(item.get("text", "")))
            elif item.get("type") == "image":
                images.append(_image(item.get("source", {})))
            elif item.get("type") == "tool_reference" and (name := item.get("tool_name") or item.get("name")):
                references.append({"type": "tool_reference", "name": name})
    call = _text(block.get("tool_use_id"))
    messages.append({"role": "tool", "tool_call_id": call, "content": "\n".join(texts)})
    if images := [image for image in images if image["image_url"]["url"]]:
        messages.append({"role": "user", "content": images})
    if references:
        messages.append({"role": "tool", "tool_call_id": call, "content": references})


def _effort(body: Body, disabled_effort: str) -> str | None:
    thinking, output = body.get("thinking"), body.get("output_config")
    if isinstance(thinking, Mapping) and thinking.get("type") == "disabled":
        return disabled_effort
    effort = output.get("effort") if isinstance(output, Mapping) else None
    if effort is not None and effort not in _EFFORTS:
        raise NotRendered("invalid")
    return effort


def _tools(tools: object, turns: Sequence[tuple[str, Any]]) -> list[dict[str, Any]] | None:
    """Those in effect at the end of the conversation: system turns may add and remove some."""
    changes = [
        block
        for _, content in turns
        if not isinstance(content, str)
        for block in content
        if block["type"] in _TOOL_CHANGES
    ]
    given = None if tools is None else [_tool(tool) for tool in _list(tools)]
    if not changes:
        return given
    effective = {tool["name"]: tool for tool in given or ()}
    removed: set[str] = set()
    for block in changes:
        change, adds = block.get("tool"), block["type"] == "tool_addition"
        if isinstance(change, dict) and change.get("type") == "tool_definition" and adds:
            tool = _tool(change.get("definition"))
            effective[tool["name"]] = tool
            removed.discard(tool["name"])
            continue
        named = isinstance(change, dict) and change.get("type") == "tool_reference"
        name = _text(change["name"]) if named and "name" in change else ""
        if name not in effective:
            raise NotRendered("invalid")
        if adds:
            effective[name] = effective[name] | {"defer_loading": None}
            removed.discard(name)
        else:
            removed.add(name)
    return [tool for name, tool in effective.items() if name not in removed]


def _tool(tool: object) -> dict[str, Any]:
    if not (
        isinstance(tool, dict) and isinstance(tool.get("name"), str) and isinstance(tool.get("input_schema"), dict)
    ):
        raise NotRendered("invalid")
    return tool


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    schema = tool["input_schema"]
    function = {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else schema | {"type": "object"},
        "strict": tool.get("strict"),
        "defer_loading": tool.get("defer_loading"),
    }
    return {"type": "function", "function": function}
