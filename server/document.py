"""What the OpenAPI document says of errors: their shapes, and what each status means."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from kvgate.errors import Dialect

Responses = dict[int | str, dict[str, Any]]

GUARDED = (401,)  # of a route that wants a key
OPERATORS = (401, 403)
PROXIED = (400, 401, 404, 408, 413, 429, 431, 502, 503, 504)
ELSE_THE_ENGINES = "An engine's own answer is passed on unchanged, whatever its status."

_MEANING = {
    400: "The request is not valid",
    401: "The key is missing, not valid or expired",
    403: "The key has not the role operator",
    404: "There is no such model or response",
    408: "The request did not arrive in time",
    413: "The body is too large",
    429: "A limit of the key's tenant is reached",
    431: "The head is too large",
    502: "An engine failed",
    503: "No engine can take the request now",
    504: "An engine did not answer in time",
}
_RETRY_AFTER = {"retry-after": {"description": "Seconds", "schema": {"type": "integer"}}}


class OpenAIFault(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | int | None


class OpenAIError(BaseModel):
    """An error as OpenAI's clients read it."""

    error: OpenAIFault


class AnthropicFault(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    """An error as Anthropic's clients read it."""

    type: Literal["error"]
    error: AnthropicFault
    request_id: str | None


def errors(*statuses: int, dialect: Dialect = "openai") -> Responses:
    """The `responses` of a FastAPI route that may answer with these errors of the gateway."""
    model = AnthropicError if dialect == "anthropic" else OpenAIError
    return {
        status: {
            "description": _MEANING[status],
            "model": model,
            **({"headers": _RETRY_AFTER} if status in (429, 503) else {}),
        }
        for status in statuses
    }
