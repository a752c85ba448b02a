"""From a request's body to what is known of its prompt: the bytes that it is matched by, and how many tokens it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llm.model import Model
from llm.prompt import Prompt, Unrendered
from llm.tokenizer import BytesPerToken
from server.ledger.faults import Faults
from server.ledger.shelf import Shelf
from server.ledger.tokeniser import Tokeniser
from server.routing.asked import Asked

OUTPUT = 256  # tokens that a request is taken to generate where it sets no limit; an estimate for KV pressure only
LARGE = 256 * 1024  # bytes of a body; one as large, or of
MANY = 256  # messages, parts and tools, is rendered in a thread: 2 MB of tiny messages take a second

Rendered = tuple[Prompt, bytes | None]  # a prompt, and how it is spelled where it is matched by bytes


class Asking:
    """For all models. `unrendered`: requests whose prompt is not known, by reason."""

    def __init__(self, shelf: Shelf, tokeniser: Tokeniser, faults: Faults) -> None:
        self._shelf = shelf
        self._tokeniser = tokeniser
        self._faults = faults
        self._per_token: dict[str, BytesPerToken] = {}  # by model
        self.unrendered: dict[str, int] = {}

    def ask(self, route: str, model: str, fields: Mapping[str, Any], salt: str | None, size: int = 0) -> Asked:
        """What can be known at once of a request whose body of `size` bytes says `fields`, for the served `model`; `salt` is
        what the engine gets. Never raises, whatever the body says."""
        asked = Asked(output=_output(fields))
        served = self._shelf.of(model)
        if served is None:
            self._left("no_model")
            return asked
        asked.namespace, asked.speller = served.speller.namespace(served.lora, salt), served.speller
        if size >= LARGE or _is_many(fields):
            asked.unspelled, asked.unrendered = True, (route, fields)
            return asked
        try:
            made = _made(served.speller.model, route, fields)
        except Exception:  # noqa: BLE001 - told by `note`
            self._faults.note("making a prompt")
            self._left("fault")
            return asked
        self._take(asked, made, served.speller.model)
        return asked

    async def spell(self, asked: Asked) -> None:
        """Makes known the prompt of an `unspelled` request; without a word where that fails."""
        assert asked.speller is not None
        asked.unspelled = False
        model = asked.speller.model
        if asked.unrendered is not None:
            route, fields = asked.unrendered
            asked.unrendered = None
            made = await self._tokeniser.soon(lambda: _made(model, route, fields))
            if made is None:
                self._left("not_in_time")
                return
            self._take(asked, made, model)
        if asked.rendered is not None and asked.prompt is None:
            spelled = await self._tokeniser.packed(model, asked.rendered)
            if spelled is not None:
                asked.prompt, asked.tokens = spelled

    def _take(self, asked: Asked, made: Rendered | str, model: Model) -> None:
        if isinstance(made, str):
            self._left(made)
            return
        asked.rendered, asked.prompt = made
        ids = asked.rendered.ids
        if asked.prompt is None:
            asked.unspelled = True
        else:
            assert asked.speller is not None
            text = asked.rendered.text or ""
            length = len(text) if asked.rendered.media else len(asked.prompt)  # all of its text, whatever images make
            asked.tokens = len(ids) if ids is not None else self.ratio(asked.speller.name).tokens(length)

    def _left(self, reason: str) -> None:
        self.unrendered[reason] = self.unrendered.get(reason, 0) + 1

    def ratio(self, model: str) -> BytesPerToken:
        """How long the model's tokens are."""
        known = self._per_token.get(model)
        if known is None:
            known = self._per_token[model] = BytesPerToken()
        return known

    def ratios(self) -> dict[str, float]:
        """Bytes per token by model."""
        return {name: round(ratio.ratio, 3) for name, ratio in self._per_token.items()}


def _made(model: Model, route: str, fields: Mapping[str, Any]) -> Rendered | str:
    """The one prompt, or why it is not known."""
    made = model.render(route, fields)
    if isinstance(made, Unrendered):
        return made.reason
    if len(made) != 1:
        return "several_prompts"
    if not model.by_bytes:
        return made[0], None
    first = model.spelled(made[0])[0]
    assert isinstance(first, bytes)  # what comes before the first image, all of it mostly
    return made[0], first


def _is_many(fields: Mapping[str, Any]) -> bool:
    """Whether it has so many small things that time goes with their number."""
    left = MANY
    for name in ("messages", "input", "tools", "documents"):
        value = fields.get(name)
        if type(value) is list:
            left -= len(value)
            if left > 0 and name in ("messages", "input"):
                for item in value:
                    content = item.get("content") if type(item) is dict else None
                    if type(content) is list:
                        left -= len(content)
    return left <= 0


def _output(fields: Mapping[str, Any]) -> int:
    """Tokens that it may generate, up to what is usual."""
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        value = fields.get(name)
        if type(value) is int:
            return max(0, min(value, OUTPUT))
    return OUTPUT
