"""The proxied POSTs: an allow-list, since engines serve paths that nobody guards."""

from __future__ import annotations

from dataclasses import dataclass

from kvgate.errors import Dialect

Kinds = tuple[type, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """One of them. `label` is its value in metrics.

    `needs`: fields that may hold what is asked, and what each may be; one of them must be there.
    `streams`: the route knows `stream`. `usage_option`: its streams tell their usage only where `stream_options` asks.
    `computes`: its prompts are computed, and then held; where they are only counted, nothing is to be expected of them.
    """

    path: str
    dialect: Dialect
    summary: str
    needs: dict[str, Kinds]
    streams: bool = True
    usage_option: bool = False
    computes: bool = True

    @property
    def label(self) -> str:
        return self.path


_TEXT_OR_LIST: Kinds = (str, list)
_MESSAGES: dict[str, Kinds] = {"messages": (list,)}

ROUTES: dict[bytes, Route] = {
    route.path.encode(): route
    for route in (
        Route("/v1/chat/completions", "openai", "Chat completion", _MESSAGES, usage_option=True),
        Route(
            "/v1/completions",
            "openai",
            "Text completion",
            {"prompt": _TEXT_OR_LIST, "prompt_embeds": _TEXT_OR_LIST},
            usage_option=True,
        ),
        Route("/v1/responses", "openai", "Response", {"input": _TEXT_OR_LIST}),
        Route("/v1/embeddings", "openai", "Embeddings", {"input": _TEXT_OR_LIST, "messages": (list,)}, streams=False),
        Route("/v1/messages", "anthropic", "Message", _MESSAGES),
        Route(
            "/v1/messages/count_tokens", "anthropic", "Tokens of a message", _MESSAGES, streams=False, computes=False
        ),
        Route(
            "/tokenize",
            "openai",
            "Tokens of a text or of messages",
            {"prompt": (str,), "messages": (list,)},
            streams=False,
            computes=False,
        ),
        Route("/detokenize", "openai", "Text of tokens", {"tokens": (list,)}, streams=False, computes=False),
    )
}
