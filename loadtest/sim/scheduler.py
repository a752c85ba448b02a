"""Which tokens of which requests one step computes: vLLM 0.32's v1/core/sched/scheduler.py, first come first served.

Chunked prefill under a token budget; running requests before waiting ones; when blocks run out the youngest running
request is preempted and computed anew later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from loadtest.sim.blocks import Event
from loadtest.sim.cache import KvCache
from loadtest.sim.request import Finish, Request

NextToken = Callable[[Request], int]


@dataclass(frozen=True, slots=True)
class Limits:
    """max_batched_tokens: tokens in one step, over all requests. max_seqs: requests that run at the same time."""

    max_batched_tokens: int = 8192
    max_seqs: int = 256

    def __post_init__(self) -> None:
        if self.max_batched_tokens < 1 or self.max_seqs < 1:
            raise ValueError("max_batched_tokens and max_seqs must be positive")


@dataclass(frozen=True, slots=True)
class Chunk:
    """`tokens` more of a request, of which `start` are computed. preemptions tells whether it was preempted meanwhile."""

    request: Request
    start: int
    tokens: int
    preemptions: int


@dataclass(slots=True)
class Step:
    """What one forward pass computes."""

    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Output:
    """One new token of a request; first: its first; finish: why the request has ended with it."""

    request: Request
    token: int
    first: bool
    finish: Finish | None


@dataclass(slots=True)
class Lookups:
    """Prefix-cache look-ups in tokens, counted once for each request: repeats after preemption are left out."""

    queries: int = 0
    hits: int = 0


class Scheduler:
    """next_token gives the token that follows a request's tokens."""

    def __init__(self, cache: KvCache, limits: Limits, next_token: NextToken) -> None:
        self.cache = cache
        self.limits = limits
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.lookups = Lookups()
        self.preemptions = 0
        self._next_token = next_token

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Raises ValueError where the request could never be computed."""
        blocks = -(-(len(request.tokens) + 1) // self.cache.block_size)
        if blocks > self.cache.pool.usable:
            raise ValueError(f"the prompt needs {blocks} blocks and the pool has {self.cache.pool.usable}")
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """The caller has left. Its blocks are free at once; one that has ended already is left alone."""
        if request.finish is None:
            self._end(request, "abort")

    def schedule(self) -> Step:
        """The next step; empty when nothing can be computed."""
        step = Step()
        budget = self._schedule_running(step)
        if not step.preempted:
            self._schedule_waiting(step, budget)
        for chunk in step.chunks:
            chunk.request.computed += chunk.tokens
        return step

    def update(self, step: Step) -> tuple[list[Output], list[Event]]:
        """The step is computed: the tokens it gave, and what changed in the cache since the last update."""
        outputs = []
        for chunk in step.chunks:
            request = chunk.request
            if request.finish or request.preemptions != chunk.preemptions:
                continue  # it was aborted or preempted while the step ran
            if request.computed < len(request.tokens):
                continue  # a chunk of a longer prefill
            outputs.append(self._sample(request))
        return outputs, self.cache.pool.take_events()

    def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Whether every prefix is forgotten. Not while requests hold blocks, unless they are preempted for it."""
        while reset_running and self.running:
            self._preempt(self.running.pop())
        return self.cache.pool.reset()

    def _schedule_running(self, step: Step) -> int:
        """Returns the token budget that is left."""
        budget, index = self.limits.max_batched_tokens, 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            room = self.cache.max_model_len - request.computed - 1
            tokens = min(len(request.tokens) - request.computed, budget, room)
            if tokens > 0:
                if not self._allocate_or_preempt(step, request, tokens):
                    break
                step.chunks.append(Chunk(request, request.computed, tokens, request.preemptions))
                budget -= tokens
            index += 1
        return budget

    def _allocate_or_preempt(self, step: Step, request: Request, tokens: int) -> bool:
        """False when the request itself had to go."""
        while not self.cache.allocate(request, tokens):
            youngest = self.running.pop()
            self._preempt(youngest)
            step.preempted.append(youngest)
            if youngest is request:
                return False
        return True

    def _schedule_waiting(self, step: Step, budget: int) -> None:
        while budget > 0 and self.waiting and len(self.running) < self.limits.max_seqs:
            request = self.waiting[0]
            hit = self.cache.hit(request)
            cached = len(hit) * self.cache.block_size
            tokens = min(len(request.tokens) - cached, budget)
            if not self.cache.allocate(request, tokens, hit, whole=True):
                break
            if request.preemptions == 0:
                request.cached_tokens = cached
                if self.cache.looks_up(request):
                    self.lookups.queries += len(request.tokens)
                    self.lookups.hits += cached
            self.running.append(self.waiting.popleft())
            request.computed = cached
            step.chunks.append(Chunk(request, cached, tokens, request.preemptions))
            step.admitted.append(request)
            budget -= tokens

    def _sample(self, request: Request) -> Output:
        token = self._next_token(request)
        request.append(token)
        first = request.output_count == 1
        if first:
            stored = min(request.hashed * self.cache.block_size, request.prompt_count)
            request.created_tokens = max(0, stored - request.cached_tokens)
        finish: Finish | None = None
        if token == request.eos:
            finish = "stop"
        elif len(request.tokens) >= self.cache.max_model_len or request.output_count >= request.max_tokens:
            finish = "length"
        if finish:
            self._end(request, finish)
        return Output(request, token, first, finish)

    def _end(self, request: Request, finish: Finish) -> None:
        request.finish = finish
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.cache.free(request)

    def _preempt(self, request: Request) -> None:
        self.cache.free(request)
        request.computed = 0
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)
