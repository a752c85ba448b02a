"""Sends one planned request and reads its stream. One connection pool a run, no retries, no hidden requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import perf_counter_ns
from types import MappingProxyType, SimpleNamespace, TracebackType
from typing import Any, Protocol

import aiohttp
import orjson

from loadtest.outcome import Arm, Outcome, ResultClass
from loadtest.plan import PlannedRequest
from loadtest.reading import StreamReading
from loadtest.vocabulary import Ids

# vLLM closes idle connections after 5 s: letting go of them first avoids sending into one that is being closed
_KEEP_ALIVE_S = 4.0

_DETAILS = MappingProxyType(
    {
        ResultClass.BROKEN_STREAM: "the stream ended without its terminal event",
        ResultClass.NO_CONTENT: "the stream ended well without any content",
    }
)


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send. url: base of gateway or engine, without /v1. model: None asks for the only one served.
    timeout_s: from send to the end of an answer."""

    url: str
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Shot:
    """A request ready to go: its body is built before the window, so that JSON work never delays a send."""

    request: PlannedRequest
    arm: Arm
    block: int
    body: bytes


def completion_body(model: str, ids: Ids, output_tokens: int, salt: str) -> bytes:
    """Token ids in, exactly `output_tokens` out. Special tokens are shown, so that every token is content."""
    document = {
        "model": model,
        "prompt": ids,
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "cache_salt": salt,
    }
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


@dataclass(slots=True)
class _Stamp:
    """What the transport saw of one request."""

    sent_ns: int = 0
    new_connection: bool = False


@dataclass(slots=True)
class _Progress:
    reading: StreamReading = field(default_factory=StreamReading)
    status: int = 0


class Sender(Protocol):
    async def send(self, shot: Shot, planned_ns: int) -> Outcome: ...


class Client:
    """An async context manager. `send` never raises for what the server does: that becomes the outcome's class."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(_headers_sent)
        trace.on_connection_create_end.append(_connected)
        headers = {"content-type": "application/json"}
        if self._target.api_key:
            headers["authorization"] = f"Bearer {self._target.api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=self._target.timeout_s),
            trace_configs=[trace],
            headers=headers,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the client is used inside `async with`"
        return self._session

    async def warm_pool(self, connections: int) -> None:
        """Open so many connections at once, so that connecting is no part of a measured request."""

        async def touch() -> None:
            async with self.session.get(f"{self._target.url}/v1/models") as response:
                await response.read()

        await asyncio.gather(*(touch() for _ in range(connections)))

    async def send(self, shot: Shot, planned_ns: int) -> Outcome:
        stamp, progress, began = _Stamp(), _Progress(), perf_counter_ns()
        result, detail = ResultClass.BROKEN_STREAM, ""
        try:
            result, detail = await self._exchange(shot.body, stamp, progress)
        except aiohttp.ClientConnectorError as error:
            result, detail = ResultClass.REFUSED, str(error)
        except TimeoutError:
            result, detail = ResultClass.TIMEOUT, f"no complete answer in {self._target.timeout_s:g} s"
        except (aiohttp.ClientError, ConnectionError) as error:
            result, detail = ResultClass.BROKEN_STREAM, f"{type(error).__name__}: {error}"
        ended, reading = perf_counter_ns(), progress.reading
        return Outcome(
            request=shot.request,
            arm=shot.arm,
            block=shot.block,
            result=result,
            planned_ns=planned_ns,
            sent_ns=stamp.sent_ns or began,
            first_ns=reading.first_ns,
            end_ns=ended,
            itl_ns=reading.gaps_ns(),
            prompt_tokens=reading.prompt_tokens,
            completion_tokens=reading.completion_tokens,
            cached_tokens=reading.cached_tokens,
            new_connection=stamp.new_connection,
            detail=detail,
        )

    async def _exchange(self, body: bytes, stamp: _Stamp, progress: _Progress) -> tuple[ResultClass, str]:
        url, reading = f"{self._target.url}/v1/completions", progress.reading
        async with self.session.post(url, data=body, trace_request_ctx=stamp) as response:
            if response.status != 200:
                return ResultClass.HTTP_ERROR, f"HTTP {response.status}: {_reason(await response.read())}"
            async for piece in response.content.iter_any():
                reading.feed(piece, perf_counter_ns())
        result = reading.result()
        return result, reading.error or _DETAILS.get(result, "")


async def _headers_sent(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: Any) -> None:
    if isinstance(context.trace_request_ctx, _Stamp):
        context.trace_request_ctx.sent_ns = perf_counter_ns()


async def _connected(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: Any) -> None:
    if isinstance(context.trace_request_ctx, _Stamp):
        context.trace_request_ctx.new_connection = True


def _reason(body: bytes) -> str:
    """The server's message, cut to one line of 300 characters."""
    try:
        text = str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        text = body.decode("utf-8", errors="replace")
    return " ".join(text.split())[:300]
