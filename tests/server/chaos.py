"""Everything that can go wrong between a client, the gateway and its engines, picked at random.

    chaos = Chaos(seed, port, keys)
    engine.always(chaos.engine)         # answers, or breaks, in one of many ways
    await chaos.client()                # one connection: asks, or breaks, in one of many ways

No outcome is asserted here: what must hold does so afterwards, whatever happened.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

from tests.fakes import behaviours, wire
from tests.fakes.behaviours import Behaviour, Stream, Whole
from tests.fakes.connection import Received, Writer
from tests.fakes.raw_client import RawClient, Response, get, post

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
PLAIN = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'
STREAM = b'{"model":"tiny","stream":true,"messages":[{"role":"user","content":"hi"}]}'
BIG = b'{"model":"tiny","messages":[{"role":"user","content":"%b"}]}' % (b"big " * 16_000)
TOO_BIG = 400_000  # bytes; the gateway under test must take less
WRONG_BODIES = (
    b"",
    b"{",
    b"[]",
    b'{"model":"gpt-9","messages":[]}',
    b'{"model":"tiny"}',
    b'{"model":"tiny","messages":[],"stream":1}',
    b"\xff" * 40,
)
UNKNOWN = ("/", "/v1/chat", "/reset_prefix_cache", "/v1/chat/completions/", "/v1//messages", "/%2e%2e/metrics", "/docs")

HEALTHY: tuple[Behaviour, ...] = (
    Whole(),
    Whole(framing="chunked", trailers=[("x-sum", "1")]),
    Whole(framing="eof"),
    Whole(close=True),
    Stream(),
    Stream(usage="always", events_per_chunk=3),
    Stream(pause=0.004, newline=b"\r\n"),
    Stream(framing="eof"),
    behaviours.done_in_content(),
)
BROKEN: tuple[Behaviour, ...] = (
    behaviours.close_before_answer(),
    behaviours.reset(),
    behaviours.garbage(),
    behaviours.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\ncontent-length: 8\r\n\r\n{}", then="close"),
    behaviours.raw(wire.head(200, [("transfer-encoding", "chunked")]) + b"zz\r\n", then="close"),
    behaviours.huge_headers(300 * 1024),
    behaviours.cut_body(10, 100),
    behaviours.cut_body(10, 100, rst=True),
    behaviours.interim(100, 103),
    behaviours.early(behaviours.status(400)),
    Whole(after=b"HTTP/1.1 200 smuggled\r\n\r\n"),
    *(Stream(stop_after=2, stop=stop) for stop in ("cut", "cut_event", "cut_chunk", "reset", "end")),  # type: ignore[arg-type]
    *(behaviours.status(code) for code in (400, 404, 422, 429, 500, 502, 503, 504)),
)
SLOW: tuple[Behaviour, ...] = (
    behaviours.stall_before_head(),
    behaviours.stall_after_head(),
    Stream(stop_after=2, stop="stall"),
    behaviours.endless(pause=0.005),
    Stream(texts=["w" * 4000] * 60),
    Stream(pause=0.03),
)


class Chaos:
    """`ways` counts what clients did, `seen` the whole answers that they got, by status."""

    def __init__(self, seed: int, port: int, keys: list[str]) -> None:
        self._chance = random.Random(seed)
        self._port = port
        self._keys = keys
        self.ways: Counter[str] = Counter()
        self.seen: Counter[int] = Counter()
        self._clients: tuple[tuple[int, Callable[[RawClient], Awaitable[None]]], ...] = (
            (30, self._asks_in_turn),
            (10, self._leaves_early),
            (10, self._leaves_mid_answer),
            (6, self._leaves_mid_request),
            (8, self._pipelines),
            (3, self._pipelines_and_leaves),
            (6, self._asks_nonsense),
            (3, self._sends_garbage),
            (2, self._reads_slowly),
            (2, self._sends_too_much),
            (1, self._never_reads),
            (1, self._never_ends_its_request),
        )

    # -- the engine

    async def engine(self, request: Received, writer: Writer) -> None:
        draw = self._chance.random()
        kinds = HEALTHY if draw < 0.8 else BROKEN if draw < 0.985 else SLOW
        await self._chance.choice(kinds)(request, writer)

    # -- the clients

    async def client(self) -> None:
        """One connection's life. Returns once it is closed."""
        weights, ways = zip(*self._clients, strict=True)
        (way,) = self._chance.choices(ways, weights)
        self.ways[way.__name__] += 1
        small = 4096 if way in (self._reads_slowly, self._never_reads) else None
        client = await RawClient.connect(self._port, receive_buffer=small)
        try:
            await way(client)
        except (EOFError, ConnectionError, TimeoutError):
            pass  # the gateway had enough of it
        finally:
            client.close()

    def _request(self) -> bytes:
        chance = self._chance
        headers = [("authorization", f"Bearer {chance.choice(self._keys)}")]
        if chance.random() < 0.1:
            headers.append(("expect", "100-continue"))
        body = chance.choices((PLAIN, STREAM, BIG), (5, 5, 1))[0]
        path = chance.choice((CHAT, CHAT, MESSAGES))
        whole = post(path, body, headers)
        if chance.random() < 0.1:
            head = "".join(f"{name}: {value}\r\n" for name, value in headers)
            top = f"POST {path} HTTP/1.1\r\nhost: t\r\n{head}transfer-encoding: chunked\r\n\r\n".encode()
            whole = top + wire.chunk(body[:30]) + wire.chunk(body[30:]) + wire.LAST_CHUNK
        return whole

    def _splits(self, data: bytes) -> list[int]:
        return sorted(self._chance.randrange(len(data)) for _ in range(self._chance.choice((0, 0, 0, 1, 3))))

    async def _answer(self, client: RawClient) -> Response:
        answer = await client.read_response(10.0)
        if answer.complete:
            self.seen[answer.status] += 1
        return answer

    async def _pause(self) -> None:
        """Often none, at times so long that the engine has begun, or that the queue moves on."""
        if (draw := self._chance.random()) > 0.3:
            await asyncio.sleep(0.02 * draw**3)

    def _leave(self, client: RawClient) -> None:
        self._chance.choice((client.close, client.reset, client.half_close))()

    async def _asks_in_turn(self, client: RawClient) -> None:
        for _ in range(self._chance.randint(1, 4)):
            request = self._request()
            await client.send(request, self._splits(request), 0.001)
            if not (await self._answer(client)).complete:
                return

    async def _leaves_early(self, client: RawClient) -> None:
        await client.send(self._request())
        await self._pause()
        self._leave(client)
        await self._pause()

    async def _leaves_mid_answer(self, client: RawClient) -> None:
        await client.send(self._request())
        await client.read_some(10.0)
        await self._pause()
        self._leave(client)

    async def _leaves_mid_request(self, client: RawClient) -> None:
        request = self._request()
        await client.send(request[: self._chance.randrange(1, len(request))])
        await self._pause()
        self._leave(client)
        await self._pause()

    async def _pipelines(self, client: RawClient) -> None:
        requests = [self._chance.choice((self._request(), self._request(), get("/health/live"))) for _ in range(3)]
        together = b"".join(requests)
        await client.send(together, self._splits(together), 0.001)
        for request in requests:
            if not (await self._answer(client) if request[:1] == b"P" else await client.read_response(10.0)).complete:
                return

    async def _pipelines_and_leaves(self, client: RawClient) -> None:
        await client.send(b"".join(self._request() for _ in range(self._chance.choice((2, 3, 40)))))
        await self._pause()
        self._leave(client)

    async def _asks_nonsense(self, client: RawClient) -> None:
        for _ in range(3):
            kind = self._chance.randrange(4)
            if kind == 0:
                await client.send(post(self._chance.choice(UNKNOWN), PLAIN))
                await client.read_response(10.0)
            elif kind == 1:
                await client.send(get(self._chance.choice((CHAT, "/v1/models", "/health", "/metrics"))))
                await client.read_response(10.0, "GET")
            else:
                key = self._chance.choice((*self._keys, "wrong"))
                wrong = post(CHAT, self._chance.choice(WRONG_BODIES), [("x-api-key", key)])
                await client.send(wrong)
                if (await self._answer(client)).status == 401:
                    return

    async def _sends_garbage(self, client: RawClient) -> None:
        garbage = self._chance.randbytes(60)
        whole = self._chance.choice((garbage, self._request() + garbage, self._request()[:-20] + garbage))
        await client.send(whole)
        await client.read_to_end(10.0)

    async def _reads_slowly(self, client: RawClient) -> None:
        await client.send(self._request())
        await asyncio.sleep(0.05)
        await self._answer(client)

    async def _sends_too_much(self, client: RawClient) -> None:
        await client.send(post(CHAT, b"x" * TOO_BIG, [("x-api-key", self._keys[0])]))
        await self._answer(client)

    async def _never_reads(self, client: RawClient) -> None:
        await client.send(self._request())
        await asyncio.sleep(0.3)

    async def _never_ends_its_request(self, client: RawClient) -> None:
        await client.send(self._request()[:-5])
        await client.read_to_end(10.0)
