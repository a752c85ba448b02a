"""Steps a scheduler in real time, and hands each request its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtest.sim.blocks import Event
from loadtest.sim.cache import KvCache
from loadtest.sim.faults import Injector
from loadtest.sim.hashing import ALGORITHMS
from loadtest.sim.metrics import Metrics, cache_info
from loadtest.sim.profile import Profile
from loadtest.sim.request import Finish, Request
from loadtest.sim.scheduler import Limits, Output, Scheduler, Step
from loadtest.sim.text import Writer

STALL_POLL_S = 0.02
CATCH_UP_S = 0.02  # a late step makes the next ones shorter by so much at most


@dataclass(frozen=True, slots=True)
class Shape:
    """What an engine is: its cache, its limits and its speed. Raises ValueError where that cannot work.

    blocks counts the null block, as vLLM's num_gpu_blocks does. algorithm: how blocks are hashed, "sha256" or "fast".
    """

    profile: Profile
    block_size: int
    blocks: int
    max_model_len: int
    limits: Limits
    prefix_caching: bool = True
    algorithm: str = "fast"

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.algorithm not in ALGORITHMS:
            raise ValueError(f"blocks of {self.block_size} tokens, hashed by {self.algorithm}, cannot be")
        if self.max_model_len > (self.blocks - 1) * self.block_size:
            raise ValueError(
                f"a request of max_model_len {self.max_model_len} tokens does not fit in {self.blocks} blocks of "
                f"{self.block_size}, one of which is the null block"
            )


@dataclass(frozen=True, slots=True)
class Token:
    """choice: whose it is. number: the token. finish: why it is the choice's last."""

    choice: int
    number: int
    finish: Finish | None


class Inbox:
    """The tokens of an answer's choices as they come."""

    def __init__(self) -> None:
        self._tokens: list[Token] = []
        self._ready = asyncio.Event()

    def put(self, token: Token) -> None:
        self._tokens.append(token)
        self._ready.set()

    async def take(self) -> list[Token]:
        """All tokens since the last call, at least one."""
        await self._ready.wait()
        self._ready.clear()
        tokens, self._tokens = self._tokens, []
        return tokens


class Stream:
    """One request under way. Times are the loop's, in seconds."""

    __slots__ = ("arrived", "choice", "first", "inbox", "last", "request", "scheduled", "writer")

    def __init__(self, request: Request, writer: Writer, inbox: Inbox, choice: int, now: float) -> None:
        self.request = request
        self.writer = writer
        self.inbox = inbox
        self.choice = choice
        self.arrived = self.scheduled = self.first = self.last = now


class Engine:
    """model: the served name. publish: gets what changed in the cache at each step, when anything did."""

    def __init__(
        self, shape: Shape, model: str, injector: Injector, publish: Callable[[Sequence[Event]], None] | None = None
    ) -> None:
        cache = KvCache(shape.blocks, shape.block_size, shape.max_model_len, enabled=shape.prefix_caching)
        self.shape = shape
        self.scheduler = Scheduler(cache, shape.limits, self._next_token)
        info = cache_info(
            block_size=shape.block_size,
            blocks=shape.blocks,
            max_model_len=shape.max_model_len,
            prefix_caching=shape.prefix_caching,
            algorithm=shape.algorithm,
        )
        self.metrics = Metrics(model, shape.max_model_len, info, self.scheduler)
        self._injector = injector
        self._publish = publish
        self._streams: dict[Request, Stream] = {}
        self._wake = asyncio.Event()

    def submit(self, request: Request, writer: Writer, inbox: Inbox, choice: int) -> Stream:
        """Its tokens come into the inbox under the number `choice`. Raises ValueError where it can never run."""
        self.scheduler.add(request)
        now = asyncio.get_running_loop().time()
        stream = self._streams[request] = Stream(request, writer, inbox, choice, now)
        self._wake.set()
        return stream

    def abort(self, stream: Stream) -> None:
        """Its caller has left; nothing happens where it has ended."""
        if self._streams.pop(stream.request, None) is not None:
            self.scheduler.abort(stream.request)
            self.metrics.finished["abort"] += 1

    def end_early(self, stream: Stream) -> None:
        """A stop string was found: the rest is not computed."""
        if self._streams.pop(stream.request, None) is not None:
            self.scheduler.abort(stream.request)
            self._record_end(stream, "stop")

    def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Its event comes with the next step's, as in vLLM: an idle engine says nothing."""
        return self.scheduler.reset_prefix_cache(reset_running=reset_running)

    async def run(self) -> None:
        """Steps until it is cancelled."""
        loop = asyncio.get_running_loop()
        end = loop.time()
        while True:
            if not self.scheduler.busy:
                self._wake.clear()
                await self._wake.wait()
                end = loop.time()
            while self._injector.stalled():  # noqa: ASYNC110 - it ends by the clock, or is set anew
                await asyncio.sleep(STALL_POLL_S)
            step = self.scheduler.schedule()
            now = loop.time()
            self._note_admitted(step, now)
            seconds = self.shape.profile.seconds(step.chunks) * self._injector.factor()
            end = max(end, now - CATCH_UP_S) + seconds
            await asyncio.sleep(max(0.0, end - now))
            self.metrics.late_s += max(0.0, loop.time() - end)
            self._finish_step(step, loop.time())

    def _next_token(self, request: Request) -> int:
        return self._streams[request].writer.next()

    def _note_admitted(self, step: Step, now: float) -> None:
        for request in step.admitted:
            if request.preemptions == 0:
                self._streams[request].scheduled = now

    def _finish_step(self, step: Step, now: float) -> None:
        outputs, events = self.scheduler.update(step)
        if step.chunks:
            self.metrics.iteration.observe(step.tokens)
        if events and self._publish:
            self._publish(events)
        self.metrics.generated_tokens += len(outputs)
        for output in outputs:
            self._deliver(output, now)

    def _deliver(self, output: Output, now: float) -> None:
        request = output.request
        stream = self._streams[request]
        metrics = self.metrics
        if output.first:
            metrics.prompt_tokens += request.prompt_count
            metrics.cached_tokens += request.cached_tokens
            metrics.ttft.observe(now - stream.arrived)
            stream.first = now
        else:
            metrics.itl.observe(now - stream.last)
        stream.last = now
        stream.inbox.put(Token(stream.choice, output.token, output.finish))
        if output.finish:
            del self._streams[request]
            self._record_end(stream, output.finish)

    def _record_end(self, stream: Stream, finish: Finish) -> None:
        request, metrics = stream.request, self.metrics
        metrics.finished[finish] += 1
        metrics.e2e.observe(stream.last - stream.arrived)
        metrics.queue.observe(stream.scheduled - stream.arrived)
        metrics.inference.observe(stream.last - stream.scheduled)
        metrics.prefill.observe(stream.first - stream.scheduled)
        metrics.decode.observe(stream.last - stream.first)
        metrics.tpot.observe((stream.last - stream.first) / max(1, request.output_count - 1))
        metrics.request_prompt.observe(request.prompt_count)
        metrics.request_output.observe(request.output_count)
        metrics.request_computed.observe(request.prompt_count - request.cached_tokens)
