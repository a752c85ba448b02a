"""A prompt as the engine will see it, or why it cannot be known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Reason = Literal[
    "route",  # this route makes no prompt
    "invalid",  # the engine will refuse the request, or takes a form that is not known here
    "no_template",  # the model has no chat template
    "request_template",  # the request brings a template of its own
    "template_failed",  # the template refuses these messages
    "special_tokens",  # the template prints a token that the folder does not name
    "own_renderer",  # vLLM renders this model's chats by code of its own
    "media",  # an image, sound or video whose place in the text is not known
    "embeddings",  # the prompt is no text
    "suffix",  # text to be filled in
    "truncated",  # the engine may cut the prompt to a number of tokens
    "stored",  # a part of the prompt is stored in the engine
    "item",  # an input item or tool of the Responses API that is not known here
    "tokens_forwarded",  # the ids come from another engine
]
REASONS: tuple[str, ...] = get_args(Reason)


@dataclass(frozen=True, slots=True)
class Unrendered:
    """The prompt is not known. Never a guess: whoever routes falls back to what does not need it."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Media:
    """An image, sound or video in a prompt, as an opaque key: equal keys are equal content, as far as the request tells.

    start, end: where its placeholder lies in the prompt's text, in characters. The engine puts as many tokens there as the
    model makes of the content.
    """

    kind: str
    key: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. Either `text` or `ids` is set.

    add_special_tokens: whether the tokenizer dresses the text, in most models with a BOS in front. salt: the request's
    cache_salt. media: in the order of the text.
    """

    text: str | None
    ids: Sequence[int] | None = None
    add_special_tokens: bool = False
    salt: str | None = None
    media: tuple[Media, ...] = ()


class NotRendered(Exception):
    """Carries the reason out of nested conversions."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason
