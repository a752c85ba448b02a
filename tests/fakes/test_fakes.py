"""The fakes themselves: what other tests stand on."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator

import pytest

from tests.fakes import behaviours as b
from tests.fakes import wire
from tests.fakes.engine import FakeEngine, Received, Writer, refused_port, silent_port
from tests.fakes.raw_client import RawClient, Response, get, post

CHAT = "/v1/chat/completions"
BODY = b'{"model":"tiny","messages":[]}'
STREAM = b'{"model":"tiny","messages":[],"stream":true,"stream_options":{"include_usage":true}}'


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as engine:
        yield engine


async def ask(engine: FakeEngine, body: bytes = BODY, path: str = CHAT) -> Response:
    async with await RawClient.connect(engine.port) as client:
        await client.send(post(path, body))
        return await client.read_response()


async def test_records_exact_bytes_however_they_are_cut(engine: FakeEngine) -> None:
    sent = post(CHAT, BODY, [("X-Odd-Case", "a  b")])
    async with await RawClient.connect(engine.port) as client:
        await client.send(sent, splits=range(1, len(sent), 7), pause=0)
        assert (await client.read_response()).status == 200
    (request,) = engine.posts
    assert request.head + request.raw_body == sent
    assert ("X-Odd-Case", "a  b") in request.headers
    assert request.answered.is_set()
    assert not request.aborted.is_set()


async def test_takes_a_chunked_upload_and_keep_alive(engine: FakeEngine) -> None:
    top = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n"
    coded = wire.chunk(BODY[:9]) + wire.chunk(BODY[9:]) + wire.LAST_CHUNK
    async with await RawClient.connect(engine.port) as client:
        await client.send(top + coded + get("/health"), splits=[len(top) + 3, len(top) + 15])
        assert json.loads((await client.read_response()).body)["object"] == "text_completion"
        assert (await client.read_response()).status == 200
    assert engine.posts[0].body == BODY
    assert engine.posts[0].raw_body == coded
    assert [r.connection for r in engine.requests] == [1, 1]


async def test_default_answers(engine: FakeEngine) -> None:
    engine.gauges["vllm:kv_cache_usage_perc"] = 0.25
    async with await RawClient.connect(engine.port) as client:

        async def fetch(path: str) -> Response:
            await client.send(get(path))
            return await client.read_response()

        models = json.loads((await fetch("/v1/models")).body)["data"]
        assert (models[0]["id"], models[0]["max_model_len"]) == ("tiny", 4096)
        assert b'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25' in (await fetch("/metrics")).body
        assert b"version" in (await fetch("/version")).body
        assert (await fetch("/nothing")).status == 404
        engine.on_get("/health", b.status(503))
        assert (await fetch("/health")).status == 503
    whole = json.loads((await ask(engine)).body)
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
    assert (await ask(engine, b"{")).status == 400
    assert (await ask(engine, b'{"model":"other"}')).status == 404


async def test_stream_is_one_event_to_a_chunk(engine: FakeEngine) -> None:
    answer = await ask(engine, STREAM)
    assert [c.count(b"\n\n") for c in answer.chunks] == [1] * 7
    *events, usage, done = answer.events
    assert done == b"[DONE]"
    assert json.loads(usage)["usage"]["prompt_tokens"] == 64
    deltas = [json.loads(e)["choices"][0]["delta"] for e in events]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": " wor"},
        {"content": "ld"},
        {},
    ]


async def test_script_runs_in_order_then_always_then_default(engine: FakeEngine) -> None:
    engine.script(b.status(503, headers=[("retry-after", "1")]), b.status(429))
    engine.always(b.status(500))
    assert [(await ask(engine)).status for _ in range(3)] == [503, 429, 500]
    engine.always(None)
    assert (await ask(engine)).status == 200


@pytest.mark.parametrize(
    ("behaviour", "events", "complete", "end"),
    [
        (b.Stream(stop_after=2, stop="cut"), 2, False, "eof"),
        (b.Stream(stop_after=2, stop="cut_event"), 2, False, "eof"),
        (b.Stream(stop_after=2, stop="cut_chunk"), 2, False, "eof"),
        (b.Stream(stop_after=2, stop="reset"), 2, False, "reset"),
        (b.Stream(stop_after=2, stop="end"), 2, True, "message"),
        (b.Stream(framing="eof"), 7, True, "eof"),
        (b.Stream(framing="http10"), 7, True, "eof"),
        (b.Stream(framing="length", newline=b"\r\n"), 7, True, "message"),
        (b.Stream(events_per_chunk=3, pause=0.001), 7, True, "message"),
        (b.Stream(usage="null"), 7, True, "message"),
        (b.Stream(usage="never", close=True), 6, True, "message"),
        (b.done_in_content(), 7, True, "message"),
    ],
)
async def test_streams(engine: FakeEngine, behaviour: b.Stream, events: int, complete: bool, end: str) -> None:
    engine.script(behaviour)
    answer = await ask(engine, STREAM)
    assert (len(answer.events), answer.complete, answer.end) == (events, complete, end)


async def test_whole_answers(engine: FakeEngine) -> None:
    engine.script(b.Whole(gzip=True), b.Whole(framing="chunked", trailers=[("x-sum", "1")]), b.large(100_000))
    engine.script(b.Whole(cached_tokens=None), b.Whole(usage="null"), b.huge_headers(9000))
    packed, trailed, large, no_details, no_usage, huge = [await ask(engine) for _ in range(6)]
    assert json.loads(gzip.decompress(packed.body))["model"] == "tiny"
    assert trailed.trailers == [("x-sum", "1")]
    assert len(json.dumps(json.loads(large.body), separators=(",", ":"))) == len(large.body) == 100_000
    assert json.loads(no_details.body)["usage"]["prompt_tokens_details"] is None
    assert json.loads(no_usage.body)["usage"] is None
    assert len(huge.header("x-huge") or "") == 9000


async def test_wire_faults(engine: FakeEngine) -> None:
    engine.script(b.cut_body(10, 100), b.cut_body(10, 100, rst=True), b.close_before_answer(), b.reset(), b.garbage())
    cut, torn = await ask(engine), await ask(engine)
    assert (cut.body, cut.complete, cut.end) == (b"x" * 10, False, "eof")
    assert (torn.complete, torn.end) == (False, "reset")
    for end in ("eof", "reset"):
        with pytest.raises(EOFError, match=end):
            await ask(engine)
    with pytest.raises(wire.FramingError):
        await ask(engine)


async def test_interim_extra_bytes_and_split_raw(engine: FakeEngine) -> None:
    engine.script(b.interim(100, 103), b.Whole(after=b"HTTP/1.1 200 smuggled\r\n\r\n"))
    assert (await ask(engine)).interim == [100, 103]
    async with await RawClient.connect(engine.port) as client:
        await client.send(post(CHAT, BODY))
        await client.read_response()
        assert await client.read_some() == b"HTTP/1.1 200 smuggled\r\n\r\n"
    plain = wire.head(200, [("content-length", "2")]) + b"{}"
    engine.script(b.raw(plain, splits=range(1, len(plain)), pause=0, then="close"))
    assert (await ask(engine)).raw == plain


@pytest.mark.parametrize(
    "behaviour",
    [b.stall_before_head(), b.stall_after_head(), b.endless(), b.Stream(stop_after=1, stop="stall")],
    ids=["before head", "after head", "endless", "after one event"],
)
@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_a_leaving_peer_aborts(engine: FakeEngine, behaviour: b.Behaviour, leave: str) -> None:
    engine.script(behaviour)
    client = await RawClient.connect(engine.port)
    await client.send(post(CHAT, STREAM))
    request = await engine.received(1)
    await engine.wait_for(lambda: engine.running == 1)
    getattr(client, leave)()
    async with asyncio.timeout(2):
        await request.aborted.wait()
    assert not request.answered.is_set()
    assert engine.running == 0


async def test_gate_early_and_backpressure(engine: FakeEngine) -> None:
    gate = asyncio.Event()
    engine.script(b.gated(gate), b.early(b.status(413)), b.endless(0, 8192))
    asking = asyncio.create_task(ask(engine))
    await engine.received(1)
    assert not asking.done()
    gate.set()
    assert (await asking).status == 200
    async with await RawClient.connect(engine.port) as client:
        await client.send(post(CHAT, b"x" * 1000)[:-500])
        assert (await client.read_response()).status == 413
    async with await RawClient.connect(engine.port, receive_buffer=4096) as client:
        await client.send(post(CHAT, STREAM))
        request, before = await engine.received(3), -1
        async with asyncio.timeout(5):
            while request.sent != before:
                before = request.sent
                await asyncio.sleep(0.1)
        assert 0 < before < 64 * 2**20


async def test_restart_keeps_the_port(engine: FakeEngine) -> None:
    port = engine.port
    async with await RawClient.connect(port) as client:
        await engine.stop()
        assert await client.read_some() == b""
    with pytest.raises(ConnectionRefusedError):
        await RawClient.connect(port)
    await engine.start()
    assert engine.port == port
    assert (await ask(engine)).status == 200


async def test_a_broken_behaviour_is_not_silent() -> None:
    async def broken(request: Received, writer: Writer) -> None:
        raise RuntimeError("script error")

    async def session() -> None:
        async with FakeEngine() as engine:
            engine.script(broken)
            with pytest.raises(EOFError):
                await ask(engine)

    with pytest.raises(RuntimeError, match="script error"):
        await session()


async def test_ports_that_do_not_answer() -> None:
    with refused_port() as port, pytest.raises(ConnectionRefusedError):
        await RawClient.connect(port)
    with silent_port() as port, socket.socket() as sock:
        sock.settimeout(0.2)
        with pytest.raises((TimeoutError, ConnectionRefusedError)):
            sock.connect(("127.0.0.1", port))


async def test_half_close_is_an_abort_for_the_engine(engine: FakeEngine) -> None:
    engine.script(b.stall_before_head())
    async with await RawClient.connect(engine.port) as client:
        await client.send(post(CHAT, BODY))
        request = await engine.received(1)
        client.half_close()
        async with asyncio.timeout(2):
            await request.aborted.wait()
