"""From a request to the prompt that the engine will see: on the request path, so nothing here waits, and little is computed.

Everything that depends on the model alone (templates, what they take, how they treat system messages) is worked out once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from llm import anthropic, responses
from llm.content_format import ContentFormat
from llm.conversation import Item, conversation, without_developer
from llm.folder import ModelFolder, given_template
from llm.prompt import Media, NotRendered, Prompt, Unrendered
from llm.template import ChatTemplate, Message, TemplateFault

Body = Mapping[str, Any]
_UNSET = (None, "auto")  # what vLLM takes for "not given" among template arguments
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_TOKENIZED = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "tools",
)
_FENCE = "\x02kvgate-media\x03"  # around media in a trial rendering; control characters no request is likely to hold


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The engine's flags that change prompts, as they are on its command line.

    chat_template, content_format, template_kwargs: --chat-template, --chat-template-content-format and
    --default-chat-template-kwargs. drop_tools_when_none: --exclude-tools-when-tool-choice-none. max_model_len: tokens;
    None leaves requests that ask for truncation to it unrendered. disabled_thinking: what Anthropic's disabled thinking becomes.
    """

    chat_template: str | None = None
    content_format: ContentFormat | Literal["auto"] = "auto"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    drop_tools_when_none: bool = False
    max_model_len: int | None = None
    disabled_thinking: Literal["auto", "none", "low", "medium", "high", "xhigh", "max"] = "auto"


DEFAULT_OPTIONS = EngineOptions()


class Renderer:
    """Of one model. Keeps nothing of a request; may be used from several threads at once.

    dressing: how many tokens the tokenizer's special tokens add to a text.
    """

    def __init__(self, folder: ModelFolder, options: EngineOptions = DEFAULT_OPTIONS, dressing: int = 2) -> None:
        self._folder, self._options, self._dressing = folder, options, dressing
        self._given = None if options.chat_template is None else given_template(options.chat_template)
        self._own_renderer, self._takes_media = folder.own_renderer, folder.takes_media
        self._routes: dict[str, Callable[[Body], list[Prompt]]] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completion,
            "/v1/messages": self._messages,
            "/v1/messages/count_tokens": self._messages,
            "/v1/responses": self._responses,
            "/tokenize": self._tokenize,
        }
        templates = {id(t): t for t in map(self.template, (False, True)) if t is not None}.values()
        self._merge_system = not templates or any(anthropic.merges_system(t.source) for t in templates)
        self._disabled_effort: str = options.disabled_thinking
        if options.disabled_thinking == "auto":
            self._disabled_effort = self._probed_effort()

    def template(self, with_tools: bool) -> ChatTemplate | None:
        """The one that the engine uses for requests with or without tools."""
        return self._given or self._folder.template(with_tools)

    def render(self, route: str, body: Body) -> tuple[Prompt, ...] | Unrendered:
        """The prompts of a request to `route`: one, or several where a completion lists several. `body` is left as it is."""
        work = self._routes.get(route)
        if work is None:
            return Unrendered("route")
        try:
            return tuple(work(body))
        except NotRendered as outcome:
            return Unrendered(outcome.reason)
        except RecursionError:  # nested deeper than anything that reads it
            return Unrendered("invalid")

    def _messages(self, body: Body) -> list[Prompt]:
        return self._chat(
            anthropic.chat_request(body, merge_system=self._merge_system, disabled_effort=self._disabled_effort)
        )

    def _responses(self, body: Body) -> list[Prompt]:
        return self._chat(responses.chat_request(body), checked=False)

    def _tokenize(self, body: Body) -> list[Prompt]:
        if "messages" not in body:
            if not isinstance(body.get("prompt"), str):
                raise NotRendered("invalid")
            return [Prompt(body["prompt"], add_special_tokens=_flag(body, "add_special_tokens", True))]
        known = {key: body[key] for key in _TOKENIZED if key in body}
        if isinstance(known["messages"], list):  # here vLLM does not know the older name of reasoning
            known["messages"] = [
                {key: value for key, value in message.items() if key != "reasoning_content"}
                if isinstance(message, dict)
                else message
                for message in known["messages"]
            ]
        return self._chat(known, drops_tools=False)

    def _chat(self, body: Body, *, checked: bool = True, drops_tools: bool = True) -> list[Prompt]:
        if body.get("chat_template") is not None:
            raise NotRendered("request_template")
        if self._own_renderer:
            raise NotRendered("own_renderer")
        _refuse_forwarded(body)
        kwargs = self._kwargs(body, checked, drops_tools)
        tools = kwargs.pop("tools", None)
        template = self.template(tools is not None)
        if template is None:
            raise NotRendered("no_template")
        if not self._folder.unknown_tokens.isdisjoint(template.variables):
            raise NotRendered("special_tokens")
        form = template.content_format if self._options.content_format == "auto" else self._options.content_format
        items: list[Item] | None = [] if self._takes_media and form == "openai" else None
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise NotRendered("invalid")
        made = conversation(messages, form, items=items, checked=checked)
        if not template.knows_developer and any(message["role"] == "developer" for message in made):
            made = without_developer(made)
        text = self._text(template, made, tools, kwargs)
        return [
            Prompt(
                self._whole(text, body),
                add_special_tokens=_flag(body, "add_special_tokens", False),
                salt=_salt(body),
                media=self._media(template, made, tools, kwargs, text, items) if items else (),
            )
        ]

    def _kwargs(self, body: Body, checked: bool, drops_tools: bool) -> dict[str, Any]:
        """Everything the template is given besides the messages."""
        asked = body.get("chat_template_kwargs")
        if asked is not None and not isinstance(asked, dict):
            raise NotRendered("invalid")
        asked = asked or {}
        if asked.get("chat_template") is not None:
            raise NotRendered("request_template")
        if "tokenize" in asked and asked["tokenize"] not in _UNSET:
            raise NotRendered("invalid")
        kwargs = dict(self._options.template_kwargs)
        if not checked and not kwargs:
            kwargs = dict(asked)  # the Responses API hands on what is null, unless the engine has defaults
        tools = _tools(body)
        if tools is not None and not (
            drops_tools and self._options.drop_tools_when_none and body.get("tool_choice") == "none"
        ):
            kwargs["tools"] = tools
        kwargs |= {key: value for key, value in asked.items() if value not in _UNSET}
        kwargs["add_generation_prompt"] = _flag(body, "add_generation_prompt", True)
        kwargs["continue_final_message"] = _flag(body, "continue_final_message", False)
        if body.get("documents") is not None:
            kwargs["documents"] = _documents(body["documents"])
        effort = body.get("reasoning_effort")
        if effort is not None:
            if effort not in _EFFORTS:
                raise NotRendered("invalid")
            kwargs["reasoning_effort"] = effort
            if "enable_thinking" not in asked:
                kwargs["enable_thinking"] = effort != "none"
        return kwargs

    def _text(self, template: ChatTemplate, messages: Sequence[Message], tools: Any, kwargs: Mapping[str, Any]) -> str:
        try:
            return template.render(
                messages,
                tools=tools,
                documents=kwargs.get("documents"),
                add_generation_prompt=kwargs["add_generation_prompt"],
                continue_final_message=kwargs["continue_final_message"],
                special_tokens=self._folder.special_tokens,
                kwargs=kwargs,
            )
        except TemplateFault as fault:
            raise NotRendered("template_failed") from fault

    def _media(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: Any,
        kwargs: Mapping[str, Any],
        text: str,
        items: Sequence[Item],
    ) -> tuple[Media, ...]:
        """Where the items' placeholders lie: rendered once more with fences around them, which must change nothing else."""
        fence = {"type": "text", "text": _FENCE}
        fenced = [
            message | {"content": [p for part in message["content"] for p in _fenced(part, fence)]}
            if isinstance(message["content"], list)
            else message
            for message in messages
        ]
        pieces = self._text(template, fenced, tools, kwargs).split(_FENCE)
        if len(pieces) != 2 * len(items) + 1 or "".join(pieces) != text:
            raise NotRendered("media")
        at, ends = 0, [0]
        for piece in pieces:
            at += len(piece)
            ends.append(at)
        spans = list(pairwise(ends[1:]))[::2]
        return tuple(Media(item.kind, item.key, *span) for item, span in zip(items, spans, strict=True))

    def _completion(self, body: Body) -> list[Prompt]:
        if body.get("prompt_embeds") is not None:
            raise NotRendered("embeddings")
        if body.get("suffix") is not None:
            raise NotRendered("suffix")
        _refuse_forwarded(body)
        prompt = body.get("prompt")
        add, salt = _flag(body, "add_special_tokens", True), _salt(body)
        if isinstance(prompt, str) and prompt:
            return [Prompt(self._whole(prompt, body), add_special_tokens=add, salt=salt)]
        if not isinstance(prompt, list) or not prompt:
            raise NotRendered("invalid")
        if _are_ids(prompt):
            return [Prompt(None, self._whole_ids(prompt, body), salt=salt)]
        if all(isinstance(text, str) for text in prompt):
            return [Prompt(self._whole(text, body), add_special_tokens=add, salt=salt) for text in prompt]
        if all(isinstance(ids, list) and ids and _are_ids(ids) for ids in prompt):
            return [Prompt(None, self._whole_ids(ids, body), salt=salt) for ids in prompt]
        raise NotRendered("invalid")

    def _whole(self, text: str, body: Body) -> str:
        """The text, where the engine surely cuts nothing off and can encode it: no token is shorter than a byte."""
        try:
            length = len(text) if text.isascii() else len(text.encode())
        except UnicodeEncodeError as error:  # half a surrogate pair, out of escaped JSON inside a string
            raise NotRendered("invalid") from error
        self._fits(length + self._dressing, body)
        return text

    def _whole_ids(self, ids: Sequence[int], body: Body) -> Sequence[int]:
        self._fits(len(ids), body)
        return ids

    def _fits(self, tokens: int, body: Body) -> None:
        """Raises where the engine may truncate a prompt of at most so many tokens."""
        limit = body.get("truncate_prompt_tokens")
        if limit is None:
            return
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < -1:
            raise NotRendered("invalid")
        if limit == -1:
            limit = (self._options.max_model_len or 1) - 1
        if tokens > limit:
            raise NotRendered("truncated")

    def _probed_effort(self) -> str:
        """What vLLM makes of Anthropic's disabled thinking: "low" where the template refuses or ignores "none"."""
        probe = {"messages": [{"role": "user", "content": "Hi"}]}
        texts = {
            e: self._probe(probe | {"reasoning_effort": e}) for e in ("none", "low", "medium", "high", "xhigh", "max")
        }
        none = texts.pop("none")
        return "low" if none is None or none in texts.values() else "none"

    def _probe(self, body: Body) -> str | None:
        try:
            return self._chat(body)[0].text
        except NotRendered:
            return None


def _fenced(part: dict[str, Any], fence: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return (part,) if part["type"] in ("text", "tool_reference") else (fence, part, fence)


def _refuse_forwarded(body: Body) -> None:
    forwarded = body.get("kv_transfer_params")
    if isinstance(forwarded, dict) and forwarded.get("prompt_token_ids") is not None:
        raise NotRendered("tokens_forwarded")


def _flag(body: Body, name: str, default: bool) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise NotRendered("invalid")
    return value


def _salt(body: Body) -> str | None:
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise NotRendered("invalid")
    return salt


def _are_ids(values: Sequence[Any]) -> bool:
    """Whole numbers from 0 on, of which no model has more than four bytes hold; JSON's true and false are none."""
    return all(type(value) is int and 0 <= value < 1 << 32 for value in values)


def _documents(documents: object) -> list[dict[str, Any]]:
    if not isinstance(documents, list) or not all(
        isinstance(document, dict) and all(isinstance(value, str) for value in document.values())
        for document in documents
    ):
        raise NotRendered("invalid")
    return documents


def _tools(body: Body) -> list[dict[str, Any]] | None:
    """The tools as templates print them: vLLM's fields in vLLM's order, whatever else the request says left out."""
    tools = body.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise NotRendered("invalid")
    return [_tool(tool) for tool in tools]


def _tool(tool: object) -> dict[str, Any]:
    given = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
    if not (isinstance(tool, dict) and isinstance(given, dict) and isinstance(given.get("name"), str)):
        raise NotRendered("invalid")
    description, parameters = given.get("description"), given.get("parameters")
    if not isinstance(description, str | None) or not isinstance(parameters, dict | None):
        raise NotRendered("invalid")
    function: dict[str, Any] = {"name": given["name"], "description": description, "parameters": parameters}
    deferred = tool.get("defer_loading")
    later = given.get("defer_loading")
    for key, value in (("strict", given.get("strict")), ("defer_loading", deferred if later is None else later)):
        if not isinstance(value, bool | None):
            raise NotRendered("invalid")
        if value is not None:
            function[key] = value
    made: dict[str, Any] = {"type": "function", "function": function}
    if deferred is not None:
        made["defer_loading"] = deferred
    return made
