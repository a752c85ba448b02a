"""Cached tokens: what could have hit, what the answers report, what the engine counted. Unknown is None, never 0."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loadtest.outcome import Outcome
from loadtest.run import Block


def reusable(shared: int, prompt: int, block_size: int) -> int:
    """Whole blocks of what is shared; the last token of a prompt is always computed, since its logits are needed."""
    return max(0, min(shared, prompt - 1)) // block_size * block_size


def ceiling(outcomes: Iterable[Outcome], block_size: int | None) -> int | None:
    """Sum over all requests, failed ones included, of the tokens that the plan lets them share."""
    if block_size is None:
        return None
    return sum(reusable(o.request.shared_tokens, o.request.prompt_tokens, block_size) for o in outcomes)


def delivered(outcomes: Iterable[Outcome]) -> int | None:
    """Sum of the cached tokens that answered requests report; None when one answered without saying."""
    counts = [o.cached_tokens for o in outcomes if o.ok]
    return None if None in counts or not counts else sum(c for c in counts if c is not None)


@dataclass(frozen=True, slots=True)
class CounterCheck:
    """A counter's growth over a window against the sum of the answers. agrees is None when either is unknown."""

    counter: str
    grew: int | None
    answers: int | None
    slack: int

    @property
    def agrees(self) -> bool | None:
        if self.grew is None or self.answers is None:
            return None
        return self.answers <= self.grew <= self.answers + self.slack


def check_counters(block: Block) -> list[CounterCheck]:
    """Exact agreement. Only a failed request, whose usage nobody saw, may account for more: up to its prompt."""
    slack = sum(o.request.prompt_tokens for o in block.outcomes if not o.ok)
    prompts = [o.prompt_tokens for o in block.outcomes if o.ok]
    sent = None if None in prompts else sum(p for p in prompts if p is not None)
    cached = delivered(block.outcomes)
    b, a = block.before, block.after
    grew = (
        (None, None, None)
        if b is None or a is None
        else (
            _delta(b.prompt_tokens, a.prompt_tokens),
            _delta(b.cached_tokens, a.cached_tokens),
            _delta(b.hit_tokens, a.hit_tokens),
        )
    )
    return [
        CounterCheck("vllm:prompt_tokens_total", grew[0], sent, slack),
        CounterCheck("vllm:prompt_tokens_cached_total", grew[1], cached, slack),
        CounterCheck("vllm:prefix_cache_hits_total", grew[2], cached, slack),
    ]


def _delta(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
