"""What goes through: bodies to the byte, streams event by event, headers that belong end to end."""

import asyncio

import pytest

from tests.fakes import behaviours
from tests.fakes.behaviours import Stream, Whole
from tests.fakes.engine import FakeEngine
from tests.fakes.raw_client import RawClient, post
from tests.server.running import running_gateway

CHAT = "/v1/chat/completions"
# key order, blanks, escapes, a duplicate key, an unknown field: all of it must arrive as it was sent
ODD = (
    rb'{ "model":"tiny" , "zzz":1.0, "messages":[{"content":"\u00e9\/\n '
    + "ü€😀".encode()
    + rb'","role":"user"}],"zzz":2 }'
)


def body(stream: bool = False, **extra: object) -> bytes:
    flag = b',"stream":true,"stream_options":{"include_usage":true}' if stream else b""
    return b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]' + flag + b"}"


async def test_body_and_answer_are_byte_exact(engine: FakeEngine) -> None:
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        await client.send(post(CHAT, ODD))
        answer = await client.read_response()
        assert answer.status == 200
        assert engine.posts[0].body == ODD
        assert answer.body == Whole().content(engine.posts[0])
        assert answer.header("x-kvgate-delivered-tokens") == "32"
        assert answer.header("x-kvgate-replica") == f"127.0.0.1:{engine.port}"
        assert gateway.metric("kvgate_prompt_tokens_total", usage="known") == 64
        assert gateway.metric("kvgate_prefix_tokens_total", stage="delivered") == 32
        assert gateway.metric("kvgate_requests_total", code="200", model="tiny", route=CHAT) == 1


async def test_a_body_in_pieces_and_in_chunks_arrives_whole(engine: FakeEngine) -> None:
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        await client.send(post(CHAT, ODD), splits=[1, 20, 60, 100, 140, 200])
        assert (await client.read_response()).status == 200
        head = f"POST {CHAT} HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        chunks = b"5\r\n" + ODD[:5] + b"\r\n" + b"%x\r\n" % (len(ODD) - 5) + ODD[5:] + b"\r\n0\r\nhost: evil\r\n\r\n"
        await client.send(head + chunks, splits=[len(head) + 3])
        assert (await client.read_response()).status == 200
        assert [r.body for r in engine.posts] == [ODD, ODD]
        assert [v for k, v in engine.posts[1].headers if k == "host"] == [f"127.0.0.1:{engine.port}"]
        assert [v for k, v in engine.posts[1].headers if k == "content-length"] == [str(len(ODD))]


async def test_headers_pass_end_to_end_and_hop_by_hop_ones_do_not(engine: FakeEngine) -> None:
    engine.script(Whole(headers=[("x-custom", "back"), ("connection", "x-hop"), ("x-hop", "1"), ("keep-alive", "5")]))
    sent = [
        ("x-custom", "there"),
        ("traceparent", "00-1-2-01"),
        ("authorization", "Bearer k"),
        ("connection", "keep-alive, x-hop"),
        ("x-hop", "1"),
        ("te", "trailers"),
        ("x-request-id", "mine-1"),
    ]
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        await client.send(post(CHAT, body(), sent))
        answer = await client.read_response()
        there = engine.posts[0].headers
        assert ("x-custom", "there") in there
        assert ("traceparent", "00-1-2-01") in there
        assert ("x-request-id", "mine-1") in there
        assert not {"x-hop", "te", "connection"} & {k for k, _ in there}
        assert answer.header("x-custom") == "back"
        assert answer.header("x-request-id") == "mine-1"
        assert answer.header("x-hop") is None
        assert answer.header("keep-alive") is None
        assert len([k for k, _ in answer.headers if k == "content-length"]) == 1


async def test_an_unfit_request_id_is_replaced(engine: FakeEngine) -> None:
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        await client.send(post(CHAT, body(), [("x-request-id", "a b" * 100)]))
        given = (await client.read_response()).header("x-request-id")
        assert given is not None
        assert given.startswith("req-")
        assert ("x-request-id", given) in engine.posts[0].headers


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("framing", ["chunked", "eof", "length"])
async def test_a_stream_comes_event_by_event_as_the_engine_sent_it(
    engine: FakeEngine, newline: bytes, framing: behaviours.Framing
) -> None:
    stream = Stream(newline=newline, framing=framing, usage="always", pause=0.01)
    engine.script(stream)
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        await client.send(post(CHAT, body(stream=True)))
        answer = await client.read_response()
        assert answer.complete
        assert answer.body == b"".join(stream.events(engine.posts[0]))
        assert answer.chunks[:-1] == stream.events(engine.posts[0])[: len(answer.chunks) - 1]
        assert gateway.metric("kvgate_prefix_tokens_total", stage="delivered") == 32
        assert gateway.metric("kvgate_ttft_seconds_count") == 1
        await client.send(post(CHAT, body()))
        assert (await client.read_response()).status == 200


async def test_an_event_is_passed_on_before_the_next_one_exists(engine: FakeEngine) -> None:
    gate = asyncio.Event()

    async def two_then_wait(request, writer):  # type: ignore[no-untyped-def]
        all_events = Stream().events(request)
        await writer.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for event in all_events[:2]:
            await writer.send(b"%x\r\n%b\r\n" % (len(event), event))
        await gate.wait()
        for event in all_events[2:]:
            await writer.send(b"%x\r\n%b\r\n" % (len(event), event))
        await writer.send(b"0\r\n\r\n")

    engine.script(two_then_wait)
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        await client.send(post(CHAT, body(stream=True)))
        start = await client.read_until(b"Hello")
        assert b"data: " in start
        gate.set()


async def test_done_inside_content_does_not_end_a_stream(engine: FakeEngine) -> None:
    engine.script(behaviours.done_in_content())
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        await client.send(post(CHAT, body(stream=True)))
        answer = await client.read_response()
        assert answer.complete
        assert answer.events[-1] == b"[DONE]"
        assert any(b" and on" in event for event in answer.events)


async def test_interim_answers_and_trailers_are_swallowed(engine: FakeEngine) -> None:
    engine.script(behaviours.interim(100, 103, then=Whole(framing="chunked", trailers=[("x-checksum", "1")])))
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        await client.send(post(CHAT, body()))
        answer = await client.read_response()
        assert (answer.status, answer.interim, answer.trailers) == (200, [], [])
        assert answer.body == Whole().content(engine.posts[0])


@pytest.mark.parametrize("size", [1000, 1024 * 1024, 1024 * 1024 + 1, 3_000_000])
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_large_answers_come_whole(engine: FakeEngine, size: int, framing: behaviours.Framing) -> None:
    content = b'{"padding":"' + b"x" * (size - 14) + b'"}'
    engine.script(Whole(body=content, framing=framing))
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        await client.send(post(CHAT, body()))
        answer = await client.read_response()
        assert answer.complete
        assert answer.body == content
        await client.send(post(CHAT, body()))
        assert (await client.read_response()).status == 200


async def test_an_error_of_the_engine_passes_as_it_is(engine: FakeEngine) -> None:
    engine.script(behaviours.status(422, b'{"error":{"message":"no","code":422}}', [("retry-after", "7")]))
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        await client.send(post(CHAT, body()))
        answer = await client.read_response()
        assert (answer.status, answer.header("retry-after")) == (422, "7")
        assert answer.body == b'{"error":{"message":"no","code":422}}'


async def test_unknown_usage_is_not_counted_as_zero(engine: FakeEngine) -> None:
    engine.script(Whole(usage="null"), Whole(cached_tokens=None))
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        for _ in range(2):
            await client.send(post(CHAT, body()))
            assert (await client.read_response()).header("x-kvgate-delivered-tokens") is None
        assert gateway.metric("kvgate_prompt_tokens_total", usage="known") == 0
        assert gateway.metric("kvgate_prompt_tokens_total", usage="unknown") == 64


async def test_http10_client_gets_a_stream_without_chunks(engine: FakeEngine) -> None:
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        data = body(stream=True)
        await client.send(f"POST {CHAT} HTTP/1.0\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        answer = await client.read_response()
        assert answer.header("transfer-encoding") is None
        assert answer.end == "eof"
        assert answer.body == b"".join(Stream().events(engine.posts[0]))


async def test_pipelined_requests_are_answered_in_order(engine: FakeEngine) -> None:
    gate = asyncio.Event()
    engine.script(behaviours.gated(gate), Stream())
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        live = b"GET /health/live HTTP/1.1\r\nhost: t\r\n\r\n"
        unknown = post(CHAT, b'{"model":"nope","messages":[]}')
        await client.send(post(CHAT, body()) + live + post(CHAT, body(stream=True)) + unknown + live)
        await engine.received(1)
        gate.set()
        answers = [await client.read_response() for _ in range(5)]
        assert [a.status for a in answers] == [200, 200, 200, 404, 200]
        assert b"chat.completion" in answers[0].body
        assert answers[1].body == b'{"status":"ok"}'
        assert answers[2].events[-1] == b"[DONE]"
        assert gateway.inflight == 0
