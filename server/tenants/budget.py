"""What a tenant may use in a minute and at once, and how a request over it is answered; shared by all kinds of limits.

Each limit by the minute is a bucket that holds a minute's worth and refills evenly. So a tenant that was idle may use a
minute's worth at once, and in any window no more than the limit for that window plus one bucket.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvgate.errors import Problem

CODE = "rate_limit_exceeded"
EPSILON = 1e-6  # of a request or a token: what refilling in floating point may lack
CONCURRENCY_WAIT = 1.0  # seconds; when a running request will end is not known


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one tenant; None is unlimited. Tokens are as the engine counts them.

    cached_weight: what an input token counts that came from the prefix cache, 0 to 1. It is known only from the engine's
    answer, so a request is first charged in full.
    """

    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    concurrency: int | None = None
    cached_weight: float = 1.0

    @property
    def unlimited(self) -> bool:
        return (
            self.requests_per_minute is None
            and self.input_tokens_per_minute is None
            and self.output_tokens_per_minute is None
            and self.concurrency is None
        )


NO_LIMITS = Limits()


class Lease(Protocol):
    """One admitted request's share. Every way out of the request ends in `release`; both calls count once."""

    def settle(self, prompt: int | None, cached: int | None, output: int | None) -> None:
        """Puts the engine's counts in place of the estimate; before `release`. None is unknown.

        Without `prompt` the estimate stands; without `cached` nothing was cached; without `output` nothing is charged.
        A request that no engine has seen settles with zeros, and has cost its tenant one request and nothing more.
        """

    def release(self) -> None:
        """Gives the place among the concurrent requests back, and closes the lease."""


class UnlimitedLease:
    """Holds nothing."""

    __slots__ = ()

    def settle(self, prompt: int | None, cached: int | None, output: int | None) -> None:
        pass

    def release(self) -> None:
        pass


class Waits(NamedTuple):
    """Seconds until each limit would let the request pass; 0 where it does already."""

    requests: float
    input_tokens: float
    output_tokens: float
    concurrency: float


def input_charge(prompt: int, cached: int | None, cached_weight: float) -> float:
    """What a settled request counts against the input limit, in tokens. Counts that cannot be are bounded."""
    prompt = max(0, prompt)
    cached = min(max(0, cached or 0), prompt)
    return prompt - cached * (1.0 - cached_weight)


def too_large(tenant: str, input_tokens: int, limits: Limits) -> Problem | None:
    """The answer to a request that no waiting would let pass: it alone exceeds a minute's input tokens."""
    limit = limits.input_tokens_per_minute
    if limit is None or input_tokens <= limit:
        return None
    return Problem(
        429,
        CODE,
        f"The request has about {input_tokens} input tokens, more than tenant {tenant} may send in a minute ({limit}). "
        "Waiting does not help: shorten it, or have the limit raised.",
        reason="input_tokens",
    )


def over_limit(tenant: str, limits: Limits, waits: Waits) -> Problem:
    """429 for the limit that is the last to let the request pass."""
    wait = max(waits.requests, waits.input_tokens, waits.output_tokens, waits.concurrency)
    if wait == waits.requests:
        reason, limit = "requests", f"{limits.requests_per_minute} requests per minute"
    elif wait == waits.input_tokens:
        reason, limit = "input_tokens", f"{limits.input_tokens_per_minute} input tokens per minute"
    elif wait == waits.output_tokens:
        reason, limit = "output_tokens", f"{limits.output_tokens_per_minute} output tokens per minute"
    else:
        reason, limit = "concurrency", f"{limits.concurrency} concurrent requests"
    seconds = max(1, math.ceil(wait - EPSILON))
    return Problem(
        429,
        CODE,
        f"Tenant {tenant} is at its limit of {limit}. Try again in {seconds} s.",
        retry_after=seconds,
        reason=reason,
    )
