"""Whether prompts made here are those that the engine makes: against its own /tokenize, before anything relies on it.

Pure: the caller sends `probes` to the engine and hands over what comes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llm.prompt import Prompt, Unrendered
from llm.renderer import Renderer
from llm.tokenizer import ModelTokenizer

_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two lists of token ids part. ours, theirs: that token with its text, or "the end"."""

    at: int
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"token {self.at}: {self.ours} here, {self.theirs} in the engine"


def probes() -> list[dict[str, Any]]:
    """Bodies for the engine's /tokenize, each without `model`: chats, tools, and texts that tokenizers disagree about."""
    talk = [{"role": "user", "content": "Hi, 12345 naïve cafés!"}, {"role": "assistant", "content": " Yes?\n\n"}]
    return [
        {"messages": [{"role": "user", "content": "Hello"}]},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                *talk,
                {"role": "user", "content": "漢字 👩🏽\u200d🚀"},
            ]
        },
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {"messages": [{"role": "user", "content": "Weather in Rome?"}], "tools": [_TOOL]},
        {"messages": talk, "add_generation_prompt": False, "continue_final_message": True},
        {"prompt": "Once upon a  time,\n\tin 2026 ...", "add_special_tokens": True},
        {"prompt": " e\u0301 ▁ <0x41> <s> </s> <|im_end|>", "add_special_tokens": False},
    ]


def compare(tokenizer: ModelTokenizer, ours: Sequence[int], theirs: Sequence[int]) -> Difference | None:
    """None if they are the same, else the first place where they part."""
    if list(ours) == list(theirs):
        return None
    pairs = zip(ours, theirs, strict=False)
    at = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    return Difference(at, _spelled(tokenizer, ours, at), _spelled(tokenizer, theirs, at))


def _spelled(tokenizer: ModelTokenizer, ids: Sequence[int], at: int) -> str:
    return tokenizer.spelled_token(ids[at]) if at < len(ids) else "the end"


def check(
    renderer: Renderer, tokenizer: ModelTokenizer, body: Mapping[str, Any], answer: Mapping[str, Any] | None
) -> Difference | Unrendered | None:
    """One probe and the engine's answer to it (None: it refused). None if both agree.

    Unrendered: the prompt is not known here although the engine makes it, which is no fault but no proof either. Where the
    engine refuses, whatever is made of the request here does not matter.
    """
    if answer is None:
        return None
    made = renderer.render("/tokenize", body)
    if isinstance(made, Unrendered):
        return made
    return compare(tokenizer, token_ids(tokenizer, made[0]), answer["tokens"])


def token_ids(tokenizer: ModelTokenizer, prompt: Prompt) -> Sequence[int]:
    """The ids of a prompt, as the engine makes them; media left as their placeholders."""
    if prompt.text is None:
        return prompt.ids or ()
    return tokenizer.encode(prompt.text, prompt.add_special_tokens)
