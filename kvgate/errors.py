"""Every error that kvgate raises on purpose.

KvgateError
├── UsageError        exit 2: the call or a setting is wrong; the text names the field and the fix
├── SetupError        exit 2: something this needs is missing or does not start (engine, port, environment)
└── Problem           an HTTP answer in the caller's dialect, with a status and a code
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import orjson

Dialect = Literal["openai", "anthropic"]

# OpenAI's and Anthropic's published error types by status; what is not listed is an api_error
_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    411: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES = _OPENAI_TYPES | {413: "request_too_large", 503: "overloaded_error", 529: "overloaded_error"}


class KvgateError(Exception):
    """The root. `exit_code` is what the command returns for it."""

    exit_code = 2


class UsageError(KvgateError):
    """The call or a setting is wrong. The text names the field and the fix."""


class SetupError(KvgateError):
    """Something that is needed is missing or does not start. The text is one sentence, then any evidence."""


@dataclass(eq=False)
class Problem(KvgateError):
    """An HTTP answer that the gateway gives itself.

    status: HTTP status. code: a stable machine word. message: one sentence for a person, never text that the user typed
    into a prompt. param: the JSON field at fault. retry_after: seconds, sent as Retry-After. reason: a machine word for what
    was short (a limit, a queue), sent as x-kvgate-reason.
    """

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after: int | None = None
    reason: str | None = field(default=None, kw_only=True)

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"

    def body(self, dialect: Dialect = "openai", request_id: str | None = None) -> bytes:
        """The JSON body in the shape that the caller's SDK reads."""
        if dialect == "anthropic":
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
            error = {"type": kind, "message": self.message}
            return orjson.dumps({"type": "error", "error": error, "request_id": request_id})
        kind = _OPENAI_TYPES.get(self.status, "api_error")
        return orjson.dumps({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})

    def event(self, dialect: Dialect = "openai", request_id: str | None = None) -> bytes:
        """The same as a terminal SSE event, for a stream that has begun."""
        name = b"event: error\n" if dialect == "anthropic" else b""
        return name + b"data: " + self.body(dialect, request_id) + b"\n\n"
