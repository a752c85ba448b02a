"""What the gateway refuses, over a real socket: status, headers, and the error's shape in each dialect."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import behaviours
from tests.fakes.behaviours import Whole
from tests.fakes.engine import FakeEngine, refused_port
from tests.fakes.raw_client import RawClient, Response, get, post
from tests.server.exchange.test_dialects import MESSAGES, USAGES, minimal
from tests.server.keyring import Keyring, answer_to
from tests.server.load import CHAT, PLAIN
from tests.server.running import running_gateway
from tests.server.test_failover import until

DIALECTS = (CHAT, MESSAGES)
OPEN = {("get", "/health"), ("get", "/health/live"), ("get", "/health/ready")}
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 503: "overloaded_error"}


def assert_refused(answer: Response, path: str, status: int, code: str, reason: str | None, kind: str = "") -> None:
    """In the shape that the path's own SDK reads, and with what a client needs to try again."""
    assert answer.status == status, answer.raw
    assert answer.header("content-type") == "application/json"
    assert answer.header("x-kvgate-reason") == reason
    fields: dict[str, Any] = json.loads(answer.body)
    error = fields.pop("error")
    kind = kind or TYPES.get(status, "invalid_request_error")
    assert error.pop("message")
    if path.startswith(MESSAGES):
        assert error == {"type": kind}
        assert fields.pop("type") == "error"
        assert fields.pop("request_id") == answer.header("x-request-id") == answer.header("request-id")
    else:
        assert (error.pop("type"), error.pop("code")) == (kind, code)
        assert error.keys() == {"param"}
        assert answer.header("x-request-id")
    assert fields == {}


def retry_after(answer: Response) -> int:
    return int(answer.header("retry-after") or 0)


@pytest.fixture
def keys(tmp_path: Path) -> Keyring:
    keys = Keyring(tmp_path / "keys")
    keys.add("t-1")
    keys.add("op-1", "ops", "operator")
    return keys


# -- keys


async def test_every_route_but_health_and_its_own_description_asks_for_a_key(engine: FakeEngine, keys: Keyring) -> None:
    wrong: list[tuple[list[tuple[str, str]], str]] = [
        ([], "missing_key"),
        ([("authorization", "Basic dXNlcjpwYXNz")], "missing_key"),
        ([("authorization", "Bearer kvg_" + "x" * 43)], "invalid_key"),
        ([("x-api-key", "sk-1")], "invalid_key"),
        ([*keys.bearer("t-1"), *keys.x_api_key("op-1")], "invalid_key"),
    ]
    engine.always(Whole(body=b"{}"))
    async with running_gateway(engine.url, key_file=str(keys.path)) as gateway:
        document = json.loads((await answer_to(gateway.port, get("/openapi.json"))).body)
        routes = [(method, path) for path, methods in document["paths"].items() for method in methods]
        assert {("get", "/v1/models"), ("get", "/metrics"), ("get", "/kv/usage"), ("post", CHAT)} < set(routes)
        for method, path in routes:
            target = path.replace("{response_id}", "resp_1")

            def request(headers: list[tuple[str, str]], method: str = method, target: str = target) -> bytes:
                return get(target, headers) if method == "get" else post(target, b"{}", headers)

            if (method, path) in OPEN:
                assert (await answer_to(gateway.port, request([]))).status == 200
                continue
            for headers, code in wrong:
                assert_refused(await answer_to(gateway.port, request(headers)), path, 401, code, None)
            for headers in (keys.bearer("op-1"), keys.x_api_key("op-1")):
                assert (await answer_to(gateway.port, request(headers))).status in (200, 400, 404), path
        assert gateway.metric("kvgate_requests_total", code="401", tenant="") == 8 * len(wrong)
        sent = {name for received in engine.requests for name, _ in received.headers}
        assert not {"authorization", "x-api-key"} & sent  # a key of the gateway's is nothing to an engine


async def test_what_is_the_operator_s_is_refused_to_tenants(engine: FakeEngine, keys: Keyring) -> None:
    async with running_gateway(engine.url, key_file=str(keys.path)) as gateway:
        for path in ("/metrics", "/kv/replicas"):
            answer = await answer_to(gateway.port, get(path, keys.bearer("t-1")))
            assert_refused(answer, path, 403, "operator_only", None)
            assert (await answer_to(gateway.port, get(path, keys.bearer("op-1")))).status == 200
        async with await RawClient.connect(gateway.port) as client:  # a body without a key is not waited for
            await client.send(post(CHAT, b"x" * 1000)[:-900])
            answer = await client.read_response()
            assert_refused(answer, CHAT, 401, "missing_key", None)
            assert answer.header("connection") == "close"


# -- limits


async def test_over_a_limit_by_the_minute(engine: FakeEngine, keys: Keyring) -> None:
    limits: list[tuple[str, dict[str, float]]] = [
        ("requests", {"requests_per_minute": 1}),
        ("input_tokens", {"input_tokens_per_minute": 110}),  # the engine counts 100, the next has more than 10
        ("output_tokens", {"output_tokens_per_minute": 5}),  # the first takes 7, and leaves a debt
    ]
    async with running_gateway(engine.url, key_file=str(keys.path)) as gateway:
        for path, (reason, limit) in itertools.product(DIALECTS, limits):
            tenant = f"{reason}-of{path.replace('/', '-')}"
            keys.add(tenant, tenant)
            keys.limit(tenant, **limit)
            assert gateway.gateway.keys.reload_if_changed()  # type: ignore[attr-defined]
            engine.requests.clear()
            engine.always(Whole(body=json.dumps({"usage": USAGES[path]}).encode()))
            body = minimal(path, user="u" * 40)
            async with await RawClient.connect(gateway.port) as client:
                await client.send(post(path, body, keys.bearer(tenant)))
                assert (await client.read_response()).status == 200
                await client.send(post(path, body, keys.bearer(tenant)))
                answer = await client.read_response()
                assert_refused(answer, path, 429, "rate_limit_exceeded", reason)
                assert 1 <= retry_after(answer) <= 60
                await client.send(post(path, body, keys.bearer("t-1")))  # another tenant, on the same connection
                assert (await client.read_response()).status == 200
            assert len(engine.posts) == 2
            assert gateway.metric("kvgate_requests_total", tenant=tenant, code="429") == 1
        for reason, _ in limits:
            assert gateway.metric("kvgate_rejected_total", reason=reason) == 2


async def test_over_the_limit_of_concurrency_and_over_all_that_is_possible(engine: FakeEngine, keys: Keyring) -> None:
    keys.limit("acme", concurrency=1, input_tokens_per_minute=60)
    async with running_gateway(engine.url, key_file=str(keys.path)) as gateway:
        for number, path in enumerate(DIALECTS):
            gate = asyncio.Event()
            engine.always(behaviours.gated(gate, Whole(body=b'{"usage":{"prompt_tokens":1,"completion_tokens":1}}')))
            request = post(path, minimal(path), keys.x_api_key("t-1"))
            async with await RawClient.connect(gateway.port) as busy:
                await busy.send(request)
                await engine.received(2 * number + 1)
                answer = await answer_to(gateway.port, request)
                assert_refused(answer, path, 429, "rate_limit_exceeded", "concurrency")
                assert retry_after(answer) == 1
                gate.set()
                assert (await busy.read_response()).status == 200
            assert (await answer_to(gateway.port, request)).status == 200  # the place is free again
            answer = await answer_to(gateway.port, post(path, minimal(path, user="u" * 400), keys.bearer("t-1")))
            assert_refused(answer, path, 429, "rate_limit_exceeded", "input_tokens")
            assert answer.header("retry-after") is None  # no waiting would let it pass


# -- saturation


async def test_a_full_queue_and_a_wait_that_is_too_long(engine: FakeEngine) -> None:
    gate = asyncio.Event()
    engine.always(behaviours.gated(gate, Whole(body=b"{}")))
    options = {"max_inflight_per_replica": 1, "queue_size": 1, "queue_timeout": 0.3}
    async with running_gateway(engine.url, **options) as gateway, await RawClient.connect(gateway.port) as running:
        await running.send(post(CHAT, PLAIN))
        await engine.received(1)
        for number, path in enumerate(DIALECTS, 1):
            async with await RawClient.connect(gateway.port) as waiting:
                await waiting.send(post(path, minimal(path)))
                await until(lambda: gateway.gateway.queues.waiting == 1)
                full = await answer_to(gateway.port, post(path, minimal(path)))
                late = await waiting.read_response()
                for answer, reason in ((full, "queue_full"), (late, "queue_timeout")):
                    assert_refused(answer, path, 503, "saturated", reason)
                    assert retry_after(answer) >= 1
                    assert gateway.metric("kvgate_rejected_total", reason=reason) == number
                await waiting.send(get("/health/live"))  # the connection of the refused one goes on
                assert (await waiting.read_response()).status == 200
        gate.set()
        assert (await running.read_response()).status == 200
        assert len(engine.posts) == 1


async def test_no_engine() -> None:
    with refused_port() as port:
        async with running_gateway(f"http://127.0.0.1:{port}") as gateway:
            for path in DIALECTS:
                answer = await answer_to(gateway.port, post(path, minimal(path)))
                assert_refused(answer, path, 503, "engine_unavailable", "no_engine")
                assert retry_after(answer) >= 1
            answer = await answer_to(gateway.port, get("/v1/models"))
            assert_refused(answer, CHAT, 503, "engine_unavailable", "no_engine")
            assert retry_after(answer) >= 1
            answer = await answer_to(gateway.port, get("/health/ready"))
            assert (answer.status, answer.header("x-kvgate-reason")) == (503, "no_engine")
            assert retry_after(answer) >= 1


# -- sizes


async def test_a_body_a_head_and_a_nesting_that_are_too_large(engine: FakeEngine) -> None:
    engine.always(Whole(body=b"{}"))
    big = [("x-big", "b" * 4000)]
    async with running_gateway(engine.url, max_body_bytes=8192, max_head_bytes=2048) as gateway:
        for path in DIALECTS:
            deep, level = [
                minimal(path, metadata=0).replace(b"0", b"[" * depth + b"]" * depth) for depth in (2000, 900)
            ]
            large = await answer_to(gateway.port, post(path, b"x" * 8193))
            kind = "request_too_large" if path == MESSAGES else "invalid_request_error"
            assert_refused(large, path, 413, "body_too_large", None, kind)
            assert_refused(await answer_to(gateway.port, post(path, b"{}", big)), path, 431, "head_too_large", None)
            async with await RawClient.connect(gateway.port) as client:
                await client.send(post(path, deep))
                assert_refused(await client.read_response(), path, 400, "invalid_json", None)
                await client.send(post(path, level))
                assert (await client.read_response()).status == 200
                await client.send(post(path, b"{}", big))  # not the first one of its connection
                assert_refused(await client.read_response(), path, 431, "head_too_large", None)
                assert await client.read_to_end() == b""
            assert engine.posts[-1].body == level
        assert len(engine.posts) == 2
