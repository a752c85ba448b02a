"""How fast an engine computes prompts, measured from its own metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

# vLLM observes all three when a request finishes. One line for each engine of a data-parallel server.
# It begins with the line break before it, since `^` would cost a millisecond a page
_LINE = r"\nvllm:%s(?:\{[^}\n]*\})? ([0-9.eE+-]+)$"


def _reader(name: str) -> Callable[[bytes], list[bytes]]:
    return re.compile((_LINE % name).encode("ascii"), re.MULTILINE).findall


_tokens = _reader("request_prefill_kv_computed_tokens_sum")
_requests = _reader("request_prefill_kv_computed_tokens_count")
_seconds = _reader("request_prefill_time_seconds_sum")

MIN_TOKENS = 256
MIN_TOKENS_PER_REQUEST = 64
HALF_LIFE_TOKENS = 65536


class PrefillRate:
    """Prompt tokens that one request's prefill computes in a second, cached ones not counted, from successive scrapes.

    Measured by the engine, averaged here with a weight that halves with every `half_life` tokens computed since: by work, not
    by the clock, so that a quiet hour forgets nothing and a short prompt does not outweigh a long one. Prefill time is from
    being scheduled to the first token; what shares the engine's steps meanwhile slows it, as it will slow the next request.

    None until `min_tokens` were seen. Scrapes between which the mean prompt computed fewer than `min_per_request` tokens are
    left out: where nearly all is cached, prefill time is the fixed cost of a step and tells nothing of the rate.
    """

    __slots__ = (
        "_half_life",
        "_last",
        "_min_per_request",
        "_min_tokens",
        "_seconds",
        "_seen",
        "_tokens",
        "tokens_per_second",
    )

    def __init__(
        self,
        min_tokens: float = MIN_TOKENS,
        min_per_request: float = MIN_TOKENS_PER_REQUEST,
        half_life: float = HALF_LIFE_TOKENS,
    ) -> None:
        self._min_tokens = min_tokens
        self._min_per_request = min_per_request
        self._half_life = half_life
        self._last: tuple[float, float, float] | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets everything: another engine answers now."""
        self._last = None
        self._tokens = self._seconds = self._seen = 0.0
        self.tokens_per_second: float | None = None  # kept, since every choice of a replica asks every replica

    def observe(self, page: bytes) -> None:
        """Takes an engine's metrics page. The first one, and one after the counters went back, is only a beginning."""
        now = _counters(page)
        if now is None:
            return
        if self._last is not None and any(a < b for a, b in zip(now, self._last, strict=True)):
            self.reset()
        last, self._last = self._last, now
        if last is None:
            return
        tokens, requests, seconds = (a - b for a, b in zip(now, last, strict=True))
        if tokens <= 0 or seconds <= 0 or tokens < self._min_per_request * requests:
            return
        keep = 0.5 ** (tokens / self._half_life)
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + seconds
        self._seen += tokens
        if self._seen >= self._min_tokens:
            self.tokens_per_second = self._tokens / self._seconds


def _counters(page: bytes) -> tuple[float, float, float] | None:
    """Tokens, requests and seconds so far; None where the page lacks one of them or holds no number."""
    totals = []
    page = b"\n" + page
    for read in (_tokens, _requests, _seconds):
        found = read(page)
        try:
            total = sum(map(float, found))
        except ValueError:
            return None
        if not found or not math.isfinite(total):
            return None
        totals.append(total)
    return totals[0], totals[1], totals[2]
