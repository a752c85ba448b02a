"""Reads an OpenAI stream: first content, gaps between tokens, usage, and whether it ended as it should. Sans I/O."""

from __future__ import annotations

from typing import Any, Literal

import orjson

from loadtest.outcome import ResultClass
from loadtest.sse import Event, EventParser

Dialect = Literal["completions", "chat"]


class StreamReading:
    """Feed it each piece with the time (ns) at which it came; ask for `result()` at the end of the body."""

    def __init__(self, dialect: Dialect = "completions") -> None:
        self._dialect = dialect
        self._parser = EventParser()
        self._arrivals: list[tuple[int, int | None]] = []
        self._done = False
        self.first_ns: int | None = None
        self.error: str | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None

    def feed(self, piece: bytes, now_ns: int) -> None:
        for event in self._parser.feed(piece):
            if event.done:
                self._done = True
            elif not self._done:
                self._chunk(event, now_ns)

    def result(self) -> ResultClass:
        if self.error is not None:
            return ResultClass.STREAM_ERROR
        if not self._done:
            return ResultClass.BROKEN_STREAM
        return ResultClass.OK if self.first_ns is not None else ResultClass.NO_CONTENT

    def gaps_ns(self) -> tuple[float, ...]:
        """One gap a token after those of the first chunk. A chunk of k tokens counts as k gaps of a k-th of its wait.

        Where chunks do not say how many tokens they hold and are fewer than the tokens, only the mean is known.
        """
        if len(self._arrivals) < 2:
            return ()
        counts = [count for _, count in self._arrivals]
        if None in counts:
            total = self.completion_tokens
            if total is None or total == len(self._arrivals):
                counts = list(range(1, len(self._arrivals) + 1))
            else:
                mean = (self._arrivals[-1][0] - self._arrivals[0][0]) / max(total - 1, 1)
                return (mean,) * max(total - 1, 1)
        gaps: list[float] = []
        for (before, _), (after, _), had, has in zip(
            self._arrivals, self._arrivals[1:], counts, counts[1:], strict=False
        ):
            tokens = (has or 0) - (had or 0)
            gaps += [(after - before) / tokens] * tokens if tokens > 0 else []
        return tuple(gaps)

    def _chunk(self, event: Event, now_ns: int) -> None:
        try:
            chunk = orjson.loads(event.data)
        except orjson.JSONDecodeError:
            self.error = "a chunk that is not JSON"
            return
        if not isinstance(chunk, dict):
            self.error = "a chunk that is not an object"
            return
        if event.name == "error" or chunk.get("error") is not None:
            self.error = _message(chunk)
            return
        so_far = self._usage(chunk.get("usage"))
        choices = chunk.get("choices") or []
        content = any(_content(self._dialect, choice) for choice in choices)
        if content and self.first_ns is None:
            self.first_ns = now_ns
        # a token may bring no text yet (half a character): it counts as an arrival when the server counts it
        counted = self._arrivals[-1][1] if self._arrivals else 0
        if choices and (content or (so_far is not None and so_far > (counted or 0))):
            self._arrivals.append((now_ns, so_far))

    def _usage(self, usage: Any) -> int | None:
        if not isinstance(usage, dict):
            return None
        self.prompt_tokens = _count(usage.get("prompt_tokens"), self.prompt_tokens)
        self.completion_tokens = _count(usage.get("completion_tokens"), self.completion_tokens)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self.cached_tokens = _count(details.get("cached_tokens"), self.cached_tokens)
        return _count(usage.get("completion_tokens"), None)


def _count(value: Any, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise


def _content(dialect: Dialect, choice: Any) -> bool:
    if dialect == "completions":
        return bool(choice.get("text"))
    delta = choice.get("delta") or {}
    return bool(
        delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content") or delta.get("tool_calls")
    )


def _message(chunk: dict[str, Any]) -> str:
    error = chunk.get("error")
    text = error.get("message") if isinstance(error, dict) else error
    return str(text)[:300]
