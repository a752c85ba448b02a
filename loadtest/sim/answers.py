"""The JSON of vLLM's answers, whole and streamed, of both OpenAI routes."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import orjson

from loadtest.sim.asks import Ask

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Choice:
    """What has been generated of one choice. sent: characters of the text that have been streamed."""

    index: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    stop_reason: str | None = None
    sent: int = 0


@dataclass(slots=True)
class Usage:
    """In tokens. cached None leaves the details out, as an engine without --enable-prompt-tokens-details does."""

    prompt: int
    output: int = 0
    cached: int | None = None
    created: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.output,
            "completion_tokens": self.output,
        }

    def details(self, *, chat: bool) -> dict[str, int | None] | None:
        """Only a chat tells what was added to the cache."""
        if self.cached is None:
            return None
        return {"cached_tokens": self.cached} | ({"created_cache_tokens": self.created} if chat else {})


class Answer:
    """The frames of one answer."""

    def __init__(self, ask: Ask, *, chat: bool, request_id: str | None) -> None:
        self.ask = ask
        self.chat = chat
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{request_id or uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(self, choices: list[Choice], usage: Usage) -> bytes:
        shown = []
        for choice in choices:
            one: dict[str, Any] = {"index": choice.index}
            if self.chat:
                one["message"] = {"role": "assistant", "content": choice.text, "refusal": None, "tool_calls": []}
            else:
                one["text"] = choice.text
            one |= {"logprobs": None, "finish_reason": choice.finish, "stop_reason": choice.stop_reason}
            one["token_ids"] = choice.tokens if self.ask.return_token_ids else None
            if not self.chat:
                one["prompt_token_ids"] = self._prompt(choice.index) if self.ask.return_token_ids else None
            shown.append(one)
        done = self._frame("chat.completion" if self.chat else "text_completion") | {"choices": shown}
        done["usage"] = usage.as_dict() | {"prompt_tokens_details": usage.details(chat=self.chat)}
        if self.chat:
            done["prompt_token_ids"] = self._prompt(0) if self.ask.return_token_ids else None
        return orjson.dumps(done)

    def opening(self, usage: Usage) -> bytes:
        """The events that name the role: of a chat only."""
        if not self.chat:
            return b""
        events = b""
        for index in range(self.ask.choices):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            more = {"prompt_token_ids": self._prompt(0)} if self.ask.return_token_ids else {}
            events += self._event(choice, usage, **more)
        return events

    def delta(self, choice: Choice, token: int, text: str, usage: Usage) -> bytes:
        """One event with what is new of a choice."""
        one: dict[str, Any] = {"index": choice.index}
        one |= {"delta": {"content": text}} if self.chat else {"text": text}
        one |= {"logprobs": None, "finish_reason": choice.finish}
        if not self.chat or choice.finish:
            one["stop_reason"] = choice.stop_reason
        one["token_ids"] = [token] if self.ask.return_token_ids else None
        if not self.chat:
            first = len(choice.tokens) == 1
            one["prompt_token_ids"] = self._prompt(choice.index) if first and self.ask.return_token_ids else None
        return self._event(one, usage)

    def closing(self, usage: Usage) -> bytes:
        """The usage, where it was asked for, and the end."""
        if not self.ask.include_usage:
            return DONE
        shown, details = usage.as_dict(), usage.details(chat=self.chat)
        if details is not None:
            shown["prompt_tokens_details"] = details
        return _data({**self._stream_frame(), "choices": [], "usage": shown}) + DONE

    def _event(self, choice: dict[str, Any], usage: Usage, **more: Any) -> bytes:
        done = {**self._stream_frame(), "choices": [choice], **more}
        if self.ask.continuous_usage:
            done["usage"] = usage.as_dict()
        return _data(done)

    def _prompt(self, choice: int) -> list[int]:
        return self.ask.prompts[choice // self.ask.n].tolist()

    def _stream_frame(self) -> dict[str, Any]:
        return self._frame("chat.completion.chunk" if self.chat else "text_completion")

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.ask.model}


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
