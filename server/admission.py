"""May this request pass, and what must be known of it: one plain function, called by every route."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from kvgate.errors import Dialect, Problem


@dataclass(frozen=True, slots=True)
class Route:
    """A proxied POST. `label` is its value in metrics; `prompt` the field that holds the prompt, `types` what it may be."""

    path: str
    dialect: Dialect
    prompt: str
    types: tuple[type, ...]
    summary: str

    @property
    def label(self) -> str:
        return self.path


ROUTES: dict[bytes, Route] = {
    route.path.encode(): route
    for route in (
        Route("/v1/chat/completions", "openai", "messages", (list,), "Chat completion, streamed or not"),
        Route("/v1/completions", "openai", "prompt", (str, list), "Text completion, streamed or not"),
    )
}
_JSON_NAMES: dict[type, str] = {str: "a string", list: "an array", dict: "an object", bool: "a boolean"}


class Admission(NamedTuple):
    """What the gateway knows of an admitted request. `model` is the served name, `stream` what the client asked for."""

    model: str
    stream: bool
    tenant: str = "default"


def _wrong_type(field: str, expected: str, value: Any) -> Problem:
    got = "null" if value is None else _JSON_NAMES.get(type(value), "a number")
    return Problem(400, "invalid_type", f"'{field}' must be {expected}, not {got}.", param=field)


def admit(route: Route, body: bytes, served: Collection[str]) -> Admission | Problem:
    """Checks the few fields that the gateway needs; all others are the engine's to judge. `served` are the model names.

    An empty `served` means that no engine has told its models yet: the caller answers that before it asks here.
    """
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return Problem(400, "invalid_json", f"The body is not valid JSON: {error.msg} at character {error.pos}.")
    if type(fields) is not dict:
        return Problem(400, "invalid_type", "The body must be a JSON object.")

    model = fields.get("model")
    if model is None and len(served) == 1:
        (model,) = served
    if type(model) is not str:
        if model is None:
            return Problem(400, "missing_field", "'model' is missing: name one of GET /v1/models.", param="model")
        return _wrong_type("model", "a string", model)
    if model not in served:
        return Problem(
            404,
            "model_not_found",
            f"The model does not exist here. Served: {', '.join(sorted(served)[:20])}.",
            param="model",
        )

    stream = fields.get("stream")
    if stream is not None and type(stream) is not bool:
        return _wrong_type("stream", "a boolean", stream)

    prompt = fields.get(route.prompt)
    if prompt is None and route.prompt not in fields and not _other_prompt(fields):
        return Problem(400, "missing_field", f"'{route.prompt}' is missing.", param=route.prompt)
    if prompt is not None and type(prompt) not in route.types:
        expected = " or ".join(_JSON_NAMES[kind] for kind in route.types)
        return _wrong_type(route.prompt, expected, prompt)
    return Admission(model=model, stream=bool(stream))


def _other_prompt(fields: dict[str, Any]) -> bool:
    """vLLM takes a completion's prompt as embeddings too."""
    return fields.get("prompt_embeds") is not None
