"""Every proxied route, in its own dialect: what is forwarded, how errors look, how usage is counted, what stays hidden."""

import json

import pytest

from server.routes import ROUTES
from tests.fakes import behaviours
from tests.fakes.behaviours import Stream, Whole
from tests.fakes.engine import FakeEngine
from tests.fakes.raw_client import RawClient, get, post
from tests.server.exchange.test_faults import CHAT, ask
from tests.server.running import running_gateway

MESSAGES = "/v1/messages"
FIELDS = {"messages": [], "prompt": "x", "input": "x", "tokens": [1]}


def minimal(path: str, **extra: object) -> bytes:
    (need, *_) = ROUTES[path.encode()].needs
    return json.dumps({"model": "tiny", need: FIELDS[need], **extra}).encode()


@pytest.mark.parametrize("path", [r.decode() for r in ROUTES])
async def test_every_route_passes_its_body_and_its_answer(engine: FakeEngine, path: str) -> None:
    engine.script(Whole(body=b'{"anything": 1}'))
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        sent = minimal(path, zzz={"kept": [1.0, None]})
        await client.send(post(path, sent))
        answer = await client.read_response()
        assert (answer.status, answer.body) == (200, b'{"anything": 1}')
        assert (engine.posts[0].path, engine.posts[0].body) == (path, sent)
        assert gateway.metric("kvgate_requests_total", route=path, code="200") == 1


@pytest.mark.parametrize("path", [r.decode() for r in ROUTES])
async def test_a_missing_field_is_named(engine: FakeEngine, path: str) -> None:
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        await client.send(post(path, b'{"model":"tiny"}'))
        answer = await client.read_response()
        assert answer.status == 400
        for name in ROUTES[path.encode()].needs:
            assert f"'{name}'".encode() in answer.body


async def test_errors_of_messages_are_in_anthropic_s_shape(engine: FakeEngine) -> None:
    engine.script(Stream(stop_after=2, stop="cut"))
    async with running_gateway(engine.url, max_body_bytes=1000) as gateway:
        for sent, status, kind in (
            (b"{", 400, "invalid_request_error"),
            (b'{"model":"x","messages":[]}', 404, "not_found_error"),
            (b"x" * 2000, 413, "request_too_large"),
        ):
            async with await RawClient.connect(gateway.port) as client:
                await client.send(post(MESSAGES, sent))
                answer = await client.read_response()
                fields = json.loads(answer.body)
                assert (answer.status, fields["type"], fields["error"]["type"]) == (status, "error", kind)
                assert fields["request_id"] == answer.header("x-request-id") == answer.header("request-id")
        async with await RawClient.connect(gateway.port) as client:
            await client.send(post(MESSAGES, minimal(MESSAGES, stream=True)))
            answer = await client.read_response()
            assert not answer.complete
            assert b"\nevent: error\ndata: " in answer.body
            assert json.loads(answer.events[-1])["error"]["type"] == "api_error"


USAGES = {
    CHAT: {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 64}},
    "/v1/responses": {"input_tokens": 100, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 64}},
    MESSAGES: {
        "input_tokens": 30,
        "cache_read_input_tokens": 64,
        "cache_creation_input_tokens": 6,
        "output_tokens": 7,
    },
}


@pytest.mark.parametrize("path", USAGES)
async def test_usage_counts_the_same_in_every_dialect(engine: FakeEngine, path: str) -> None:
    engine.script(Whole(body=json.dumps({"usage": USAGES[path]}).encode()))
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        await client.send(post(path, minimal(path)))
        answer = await client.read_response()
        assert answer.header("x-kvgate-delivered-tokens") == "64"
        assert gateway.metric("kvgate_prompt_tokens_total", usage="known") == 100
        assert gateway.metric("kvgate_prefix_tokens_total", stage="delivered") == 64
        assert gateway.metric("kvgate_output_tokens_total") == 7


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"other": 1}])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
async def test_a_usage_chunk_that_the_client_did_not_ask_for_is_counted_and_hidden(
    engine: FakeEngine, options: object, newline: bytes
) -> None:
    sent = json.loads(minimal(CHAT, stream=True)) | ({} if options is None else {"stream_options": options})
    engine.script(Stream(newline=newline, events_per_chunk=3))
    async with running_gateway(engine.url) as gateway:
        answer = await ask(gateway, json.dumps(sent).encode())
        got = json.loads(engine.posts[0].body)
        assert got.pop("stream_options") == {**(options or {}), "include_usage": True}  # type: ignore[dict-item]
        assert got == {k: v for k, v in sent.items() if k != "stream_options"}
        assert answer.complete
        assert answer.body == b"".join(Stream(newline=newline, usage="never").events(engine.posts[0]))
        assert gateway.metric("kvgate_prefix_tokens_total", stage="delivered") == 32


async def test_a_usage_chunk_that_the_client_asked_for_stays(engine: FakeEngine) -> None:
    async with running_gateway(engine.url) as gateway:
        sent = minimal(CHAT, stream=True, stream_options={"include_usage": True})
        answer = await ask(gateway, sent)
        assert engine.posts[0].body == sent
        assert json.loads(answer.events[-2])["usage"]["prompt_tokens"] == 64
        assert gateway.metric("kvgate_prefix_tokens_total", stage="delivered") == 32


async def test_a_stream_that_broke_off_is_not_free(engine: FakeEngine) -> None:
    engine.script(Stream(texts=["a"] * 50, stop_after=21, stop="reset"))  # a role, then 20 tokens
    async with running_gateway(engine.url) as gateway:
        await ask(gateway, minimal(CHAT, stream=True))
        assert gateway.metric("kvgate_output_tokens_total") == 20


async def test_aliases_reach_the_model_that_they_stand_for(engine: FakeEngine) -> None:
    async with (
        running_gateway(engine.url, aliases="gpt-4o=tiny, claude-*=tiny,lost=other") as gateway,
        await RawClient.connect(gateway.port) as client,
    ):
        for name in ("gpt-4o", "claude-opus-5", "tiny"):
            await client.send(post(CHAT, b'{ "model" : "%b","messages":[ ]}' % name.encode()))
            assert (await client.read_response()).status == 200
        assert {r.body for r in engine.posts} == {b'{ "model" : "tiny","messages":[ ]}'}
        assert gateway.metric("kvgate_requests_total", model="tiny") == 3
        await client.send(post(CHAT, b'{"model":"lost","messages":[]}'))
        assert (await client.read_response()).status == 404
        await client.send(get("/v1/models"))
        listed = json.loads((await client.read_response(method="GET")).body)["data"]
        assert [(m["id"], m.get("root")) for m in listed] == [("tiny", "tiny"), ("gpt-4o", "tiny")]


async def test_x_api_key_becomes_the_bearer_token_that_vllm_takes(engine: FakeEngine) -> None:
    async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
        await client.send(post(MESSAGES, minimal(MESSAGES), [("x-api-key", "k1")]))
        await client.read_response()
        await client.send(post(MESSAGES, minimal(MESSAGES), [("x-api-key", "k1"), ("authorization", "Bearer k2")]))
        await client.read_response()
        sent = [[(k, v) for k, v in r.headers if k in ("authorization", "x-api-key")] for r in engine.posts]
        assert sent == [[("authorization", "Bearer k1")], [("authorization", "Bearer k2")]]


async def test_responses_are_fetched_and_cancelled_where_they_are(engine: FakeEngine) -> None:
    async with FakeEngine() as other, running_gateway(engine.url, other.url) as gateway:
        engine.on_get("/v1/responses/resp_1", behaviours.status(404))
        other.on_get("/v1/responses/resp_1", Whole(body=b'{"id":"resp_1"}'))
        engine.always(behaviours.status(404))
        other.always(Whole(body=b'{"id":"resp_1","status":"cancelled"}'))
        async with await RawClient.connect(gateway.port) as client:
            await client.send(get("/v1/responses/resp_1"))
            answer = await client.read_response(method="GET")
            assert (answer.status, answer.body) == (200, b'{"id":"resp_1"}')
            await client.send(post("/v1/responses/resp_1/cancel", b""))
            assert json.loads((await client.read_response()).body)["status"] == "cancelled"
            for bad in ("/v1/responses/..%2F..%2Freset_prefix_cache", "/v1/responses/a%20b"):
                await client.send(get(bad))
                assert (await client.read_response(method="GET")).status in (400, 404)
            assert not [r.path for e in (engine, other) for r in e.requests if "reset" in r.path or "%20" in r.path]
