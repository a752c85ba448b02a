"""OpenAI's Responses as the chat request that vLLM makes of them. What it stores is not known here.

Several items make one message: a model's reasoning, text and function calls that follow each other are one assistant turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llm.prompt import NotRendered

Body = Mapping[str, Any]
Message = dict[str, Any]

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_PARTIAL = ("in_progress", "incomplete")
_STATUSES = (*_PARTIAL, "completed", None)

# what vLLM shows the model of a tool that takes free text
_FREE_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}


def chat_request(body: Body) -> dict[str, Any]:
    """The chat request for `body`, messages already as vLLM hands them to its renderer. Raises NotRendered."""
    if any(body.get(key) for key in ("previous_response_id", "previous_input_messages", "prompt")):
        raise NotRendered("stored")
    messages: list[Message] = []
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise NotRendered("invalid")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    items = body.get("input")
    partial = False
    if isinstance(items, str):
        messages.append({"role": "user", "content": items})
    elif isinstance(items, list):
        turns: list[Message] = []  # instructions never merge with what follows
        for item in items:
            _add_item(item, turns)
        messages += turns
        partial = bool(items) and items[-1].get("status") in _PARTIAL and _is_partial_kind(items[-1])
    else:
        raise NotRendered("invalid")
    request: dict[str, Any] = {
        "messages": messages,
        "add_special_tokens": True,
        "add_generation_prompt": not partial,
        "continue_final_message": partial,
    }
    if body.get("truncation", "disabled") != "disabled":
        request["truncate_prompt_tokens"] = -1
    for key in ("cache_salt", "chat_template_kwargs", "kv_transfer_params"):
        if body.get(key) is not None:
            request[key] = body[key]
    reasoning = body.get("reasoning")
    if isinstance(reasoning, Mapping) and (effort := reasoning.get("effort")) is not None:
        if effort not in _EFFORTS:
            raise NotRendered("invalid")
        request["reasoning_effort"] = effort
    if body.get("tools"):
        request["tools"] = _tools(body["tools"])
    if body.get("tool_choice") == "none":
        request["tool_choice"] = "none"
    return request


def _is_partial_kind(item: dict[str, Any]) -> bool:
    return item.get("type", "message") in ("message", "reasoning")


def _add_item(item: object, messages: list[Message]) -> None:
    if not isinstance(item, dict) or item.get("status") not in _STATUSES:
        raise NotRendered("invalid")
    kind = item.get("type", "message")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind in ("function_call", "custom_tool_call"):
        call = _call(item) if kind == "function_call" else _custom_call(item)
        if last is None:
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            last.setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        _add_to(last, messages, "reasoning", _reasoning(item))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        if not isinstance(item.get("call_id"), str):
            raise NotRendered("invalid")
        messages.append({"role": "tool", "content": _content(item.get("output")), "tool_call_id": item["call_id"]})
    elif kind != "message":
        raise NotRendered("item")
    elif item.get("role") == "assistant":
        _add_to(last, messages, "content", _answer(item))
    elif item.get("role") in ("user", "system", "developer"):
        messages.append({"role": item["role"], "content": _content(item.get("content"))})
    else:
        raise NotRendered("invalid")


def _add_to(last: Message | None, messages: list[Message], field: str, value: str) -> None:
    """To the assistant's message before it where that lacks the field, else a message of its own."""
    if last is not None and last.get(field) is None:
        last[field] = value
    else:
        messages.append({"role": "assistant", field: value})


def _call(item: dict[str, Any]) -> dict[str, Any]:
    name, arguments, call = item.get("name"), item.get("arguments"), item.get("call_id")
    if not (isinstance(name, str) and isinstance(arguments, str) and isinstance(call, str)):
        raise NotRendered("invalid")
    if item.get("namespace"):
        name = f"{item['namespace']}__{name}"
    return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}


def _custom_call(item: dict[str, Any]) -> dict[str, Any]:
    """A call whose input is free text: shown to the model as a function with one argument."""
    name, text, call = item.get("name"), item.get("input"), item.get("call_id")
    if not (isinstance(name, str) and isinstance(text, str) and isinstance(call, str)):
        raise NotRendered("invalid")
    arguments = json.dumps({"input": text}, ensure_ascii=False)
    return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}


def _reasoning(item: dict[str, Any]) -> str:
    """Its first text, else the first of its summary."""
    content = item.get("content") or []
    if item.get("encrypted_content") or not (isinstance(item.get("summary"), list) and isinstance(content, list)):
        raise NotRendered("invalid")
    for part in [*content[:1], *item["summary"][:1]]:
        if not (isinstance(part, dict) and isinstance(part.get("text"), str)):
            raise NotRendered("invalid")
        return str(part["text"])
    return ""


def _answer(item: dict[str, Any]) -> str:
    """The first part of what the model said; vLLM leaves out the rest."""
    content = item.get("content")
    if isinstance(content, str):
        return content
    if not (isinstance(content, list) and content and isinstance(content[0], dict)):
        raise NotRendered("invalid")
    if content[0].get("type") != "output_text" or not isinstance(content[0].get("text"), str):
        raise NotRendered("item")
    return str(content[0]["text"])


def _content(content: object) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise NotRendered("invalid")
    parts = []
    for part in content:
        if not isinstance(part, dict):
            raise NotRendered("invalid")
        if part.get("type") in ("input_image", "input_file", "input_audio"):
            raise NotRendered("media")
        if part.get("type") != "input_text" or not isinstance(part.get("text"), str):
            raise NotRendered("item")
        parts.append(part)
    return parts


def _tools(tools: object) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise NotRendered("invalid")
    functions = []
    for tool in tools:
        if isinstance(tool, dict) and tool.get("type") == "function":
            functions.append({key: value for key, value in tool.items() if key != "type"})
        elif isinstance(tool, dict) and tool.get("type") == "custom" and tool.get("format") is None:
            functions.append({key: tool.get(key) for key in ("name", "description")} | {"parameters": _FREE_TEXT})
        else:
            raise NotRendered("item")
    return [{"type": "function", "function": function} for function in functions]
