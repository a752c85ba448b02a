"""What a client does wrong: a clear error that names the field, and the gateway stays up."""

import asyncio
import json
import re

import pytest
from prometheus_client import generate_latest

from tests.fakes.engine import FakeEngine
from tests.fakes.raw_client import RawClient, get, post
from tests.server.exchange.test_faults import CHAT, PLAIN, error, still_serves
from tests.server.running import running_gateway


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        (CHAT, b"", 400, "invalid_json", None),
        (CHAT, b"not json", 400, "invalid_json", None),
        (CHAT, b'{"model":"tiny"', 400, "invalid_json", None),
        (CHAT, b'{"model":"tiny","messages":["\xff"]}', 400, "invalid_json", None),
        (CHAT, b"[" * 100_000, 400, "invalid_json", None),
        (CHAT, b"[]", 400, "invalid_type", None),
        (CHAT, b"null", 400, "invalid_type", None),
        (CHAT, b'{"model":7,"messages":[]}', 400, "invalid_type", "model"),
        (CHAT, b'{"model":"tiny","messages":[],"stream":"yes"}', 400, "invalid_type", "stream"),
        (CHAT, b'{"model":"tiny","messages":"hi"}', 400, "invalid_type", "messages"),
        (CHAT, b'{"model":"tiny"}', 400, "missing_field", "messages"),
        (CHAT, b'{"model":"gpt-9","messages":[]}', 404, "model_not_found", "model"),
        ("/v1/completions", b'{"model":"tiny","prompt":{"a":1}}', 400, "invalid_type", "prompt"),
        ("/v1/completions", b'{"model":"tiny","prompt":null,"stream":1}', 400, "invalid_type", "stream"),
    ],
)
async def test_a_bad_body(
    engine: FakeEngine, path: str, body: bytes, status: int, code: str, param: str | None
) -> None:
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        await client.send(post(path, body))
        answer = await client.read_response()
        fields = error(answer)
        assert (answer.status, fields["code"], fields["param"]) == (status, code, param)
        assert answer.header("x-request-id")
        assert engine.posts == []
        await client.send(post(CHAT, PLAIN))  # the connection goes on
        assert (await client.read_response()).status == 200
        assert gateway.metric("kvgate_requests_total", code=str(status)) == 1


async def test_a_model_that_a_client_invents_makes_no_series(engine: FakeEngine) -> None:
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        for name in range(50):
            await client.send(post(CHAT, b'{"model":"m%d","messages":[]}' % name))
            await client.read_response()
        assert gateway.metric("kvgate_requests_total", model="other") == 50
        assert gateway.metric("kvgate_requests_total") == 50
        text = generate_latest(gateway.gateway.metrics.registry).decode()
        assert set(re.findall(r'kvgate_requests_total\{.*model="([^"]*)"', text)) == {"other"}


@pytest.mark.parametrize("framing", ["length", "chunked", "expect"])
async def test_a_body_over_the_limit_is_413_and_can_be_read(engine: FakeEngine, framing: str) -> None:
    async with running_gateway(engine.url, max_body_bytes=1000) as gateway:
        async with await RawClient.connect(gateway.port) as client:
            size = 3_000_000  # more than the sockets take in unread: a hasty close would reset it
            if framing == "chunked":
                head = f"POST {CHAT} HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n".encode()
                await client.send(head + b"%x\r\n" % size + b"x" * size)
            elif framing == "length":
                await client.send(post(CHAT, b"x" * size))
            else:
                await client.send(post(CHAT, b"x" * size, [("expect", "100-continue")])[:-size])
            answer = await client.read_response()
            assert (answer.status, error(answer)["code"]) == (413, "body_too_large")
            assert answer.interim == []
            assert answer.header("connection") == "close"
        await still_serves(gateway)


async def test_a_body_of_exactly_the_limit_passes(engine: FakeEngine) -> None:
    async with running_gateway(engine.url, max_body_bytes=len(PLAIN)) as gateway:
        await still_serves(gateway)


async def test_expect_100_continue_is_answered(engine: FakeEngine) -> None:
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        whole = post(CHAT, PLAIN, [("expect", "100-continue")])
        await client.send(whole[: -len(PLAIN)])
        assert b"100 Continue" in await client.read_until(b"\r\n\r\n")
        await client.send(PLAIN)
        assert (await client.read_response()).status == 200
        assert engine.posts[0].body == PLAIN


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
        b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: t\r\nbad header: 1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: t\r\nx: a\r\n folded\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_400(engine: FakeEngine, sent: bytes) -> None:
    async with running_gateway(engine.url) as gateway:
        async with await RawClient.connect(gateway.port) as client:
            await client.send(sent)
            answer = await client.read_response()
            assert (answer.status, error(answer)["code"]) == (400, "invalid_http")
        await still_serves(gateway)
        assert len(engine.posts) == 1


async def test_garbage_behind_a_good_request_does_not_spoil_its_answer(engine: FakeEngine) -> None:
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        await client.send(post(CHAT, PLAIN) + b"\x00garbage\r\n\r\n")
        answer = await client.read_response()
        assert answer.status == 200
        assert await client.read_to_end() == b""


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
async def test_a_head_over_the_limit_is_431(engine: FakeEngine, end: bytes) -> None:
    async with running_gateway(engine.url, max_head_bytes=2048) as gateway:
        async with await RawClient.connect(gateway.port) as client:
            await client.send(f"POST {CHAT} HTTP/1.1\r\nx-big: ".encode() + b"b" * 4000 + end)
            answer = await client.read_response()
            assert (answer.status, error(answer)["code"]) == (431, "head_too_large")
        await still_serves(gateway)


async def test_a_client_that_sends_too_slowly_is_408(engine: FakeEngine) -> None:
    async with running_gateway(engine.url, header_timeout=0.2, body_timeout=0.2) as gateway:
        for part in (b"POST /v1/compl", post(CHAT, PLAIN)[:-5]):
            async with await RawClient.connect(gateway.port) as client:
                await client.send(part)
                answer = await client.read_response()
                assert (answer.status, error(answer)["code"]) == (408, "request_timeout")
        await still_serves(gateway)


async def test_an_unused_connection_is_closed(engine: FakeEngine) -> None:
    async with running_gateway(engine.url, header_timeout=0.2, keep_alive_timeout=0.2) as gateway:
        async with await RawClient.connect(gateway.port) as client:
            assert await client.read_to_end() == b""
        for request in (post(CHAT, PLAIN), get("/health")):
            async with await RawClient.connect(gateway.port) as client:
                await client.send(request)
                await client.read_response()
                assert await client.read_to_end() == b""
        assert gateway.gateway.connections == set()


@pytest.mark.parametrize("split", [(), (30,), (250,)])
async def test_an_offered_upgrade_is_not_taken_and_the_request_is(engine: FakeEngine, split: tuple[int, ...]) -> None:
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        h2c = [("connection", "Upgrade, HTTP2-Settings"), ("upgrade", "h2c"), ("http2-settings", "AAEAAEAAAAIAAAAA")]
        for offer in (h2c, [("connection", "Upgrade"), ("upgrade", "websocket")]):
            await client.send(post(CHAT, PLAIN, offer), splits=split)
            assert (await client.read_response()).status == 200
            await client.send(get("/health/live", offer))
            assert (await client.read_response(method="GET")).status == 200
        assert [r.body for r in engine.posts] == [PLAIN, PLAIN]
        assert not {"upgrade", "http2-settings"} & {k for k, _ in engine.posts[0].headers}
        await client.send(b"CONNECT a:443 HTTP/1.1\r\nhost: a\r\n\r\n")
        assert (await client.read_response()).status == 405


async def test_what_is_not_served_is_404_or_405_in_openai_s_shape(engine: FakeEngine) -> None:
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        for path in ("/", "/version", "/reset_prefix_cache", "/v1/chat", "/v1/chat/completions/render", "/docs"):
            await client.send(post(path, b"{}"))
            answer = await client.read_response()
            assert (answer.status, error(answer)["code"]) == (404, "not_found")
        await client.send(get(CHAT))
        answer = await client.read_response()
        assert (answer.status, error(answer)["code"]) == (405, "method_not_allowed")
        assert engine.posts == []


async def test_other_spellings_of_a_path_are_the_same_path(engine: FakeEngine) -> None:
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        for path in (CHAT + "?a=b", "/v1/chat%2Fcompletions", f"http://x{CHAT}"):
            await client.send(post(path, PLAIN))
            assert (await client.read_response()).status == 200
        assert [r.path for r in engine.posts] == [CHAT + "?a=b", CHAT, CHAT]


async def test_own_routes(engine: FakeEngine) -> None:
    engine.gauges["vllm:kv_cache_usage_perc"] = 0.25
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        for path in ("/health", "/health/ready", "/health/live", "/v1/models", "/openapi.json", "/metrics"):
            await client.send(get(path))
            answer = await client.read_response(method="GET")
            assert answer.status == 200, path
            if path == "/v1/models":
                (model,) = json.loads(answer.body)["data"]
                assert (model["id"], model["max_model_len"]) == ("tiny", 4096)
            if path == "/openapi.json":
                assert {CHAT, "/v1/completions"} <= json.loads(answer.body)["paths"].keys()
            if path == "/metrics":
                assert b'kvgate_kv_utilization_ratio{replica="127.0.0.1:%d"} 0.25' % engine.port in answer.body
        await engine.stop()
        async with asyncio.timeout(5):
            while gateway.gateway.ready:
                await asyncio.sleep(0.02)
        for path, status in (("/health", 503), ("/health/ready", 503), ("/health/live", 200)):
            await client.send(get(path))
            assert (await client.read_response(method="GET")).status == status
