"""Chat templates, rendered as Hugging Face's tokenizers render them, and so as vLLM does.

A template is compiled once and then only run: nothing here reads a file or keeps anything of a request. Templates are those
that whoever runs the engine chose; one that a request brings along is never compiled, since it may run for ever.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llm.content_format import ContentFormat, content_format

Message = dict[str, Any]

# what Hugging Face's apply_chat_template takes for itself: no template ever sees them as variables of its own
_TAKEN = frozenset(
    [
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
    ]
)
# as a request's keyword these clash with what the renderer passes itself; vLLM answers 400
_CLASHING = frozenset(("messages", "conversation", "conversations", "self", "chat_template", "tokenize"))
_MARK = "KVGATE_CONTINUES_THE_FINAL_MESSAGE_HERE "


class TemplateFault(Exception):
    """The template refuses the request, or cannot be compiled. The text is the template's own."""


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant said; a prompt shows its body as it is."""

    tags = {"generation"}  # noqa: RUF012 - Extension declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """One template. Raises TemplateFault where it is no Jinja.

    `now`: local time, for templates that print the date; engine and gateway have to agree on the time zone.
    """

    def __init__(self, source: str, now: Callable[[], datetime] = datetime.now) -> None:
        self.source = source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._environment = environment
        try:
            self._compiled = environment.from_string(source)
            variables = meta.find_undeclared_variables(environment.parse(source))
        except TemplateSyntaxError as error:
            raise TemplateFault(f"line {error.lineno}: {error.message}") from error
        self.variables = frozenset(variables)
        self.knows_developer = '"developer"' in source or "'developer'" in source

    @cached_property
    def content_format(self) -> ContentFormat:
        """What the template takes for a message's content."""
        return content_format(self._environment, self.source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        special_tokens: Mapping[str, str] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. `kwargs` win over `special_tokens`, and only those that the template names count.

        Raises TemplateFault where the template refuses, or where the final message cannot be continued.
        """
        values: dict[str, Any] = dict(special_tokens or ())
        if kwargs:
            if not _CLASHING.isdisjoint(kwargs):
                raise TemplateFault("chat_template_kwargs: a name that the renderer uses itself")
            values |= {k: v for k, v in kwargs.items() if k in self.variables and k not in _TAKEN}
        final = None
        if continue_final_message:
            if add_generation_prompt:
                raise TemplateFault("a final message cannot be both continued and answered")
            messages, final = self._marked(messages)
        try:
            text = self._compiled.render(
                values,
                messages=messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:
            # a template is a program: whatever it raises means that it does not take these messages
            raise TemplateFault(f"{type(error).__name__}: {error}") from error
        return text if final is None else _cut(text, final)

    def _marked(self, messages: Sequence[Message]) -> tuple[list[Message], str]:
        """A copy whose last text ends in a mark, and that text without it."""
        content = messages[-1].get("content")
        if content is None or "content" not in self.source:
            raise TemplateFault("the final message has no content to continue")
        last = dict(messages[-1])
        if isinstance(content, str):
            final = content
            last["content"] = content + _MARK
        else:
            at = next((i for i in reversed(range(len(content))) if "text" in content[i]), None)
            if at is None:
                raise TemplateFault("the final message has no text to continue")
            final = content[at]["text"]
            last["content"] = [*content[:at], content[at] | {"text": final + _MARK}, *content[at + 1 :]]
        return [*messages[:-1], last], final


def _cut(text: str, final: str) -> str:
    """The text up to the mark; where the template trimmed what follows the final message, trimmed too."""
    at = text.rfind(_MARK.strip())
    if at < 0 or final.strip() not in text:
        raise TemplateFault("the template leaves out the end of the final message")
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()
