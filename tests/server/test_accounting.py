"""What is written down of each request, whatever became of it: the access log, usage by tenant, the trace it belongs to."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import behaviours
from tests.fakes.behaviours import Stream, Whole
from tests.fakes.engine import FakeEngine
from tests.fakes.raw_client import RawClient, get, post
from tests.server.exchange.test_dialects import MESSAGES, USAGES, minimal
from tests.server.keyring import Keyring, answer_to
from tests.server.load import CHAT, STREAM
from tests.server.load import PLAIN as SHORT
from tests.server.running import RunningGateway, running_gateway
from tests.server.test_failover import until
from tests.server.test_tracing import SPAN, TRACE, collector

PLAIN = b'{"model":"tiny","messages":[{"role":"user","content":"my secret plan"}]}'
STREAMED = PLAIN[:-1] + b',"stream":true}'


@pytest.fixture
def keys(tmp_path: Path) -> Keyring:
    keys = Keyring(tmp_path / "keys")
    keys.add("a-1", "acme")
    keys.add("b-1", "bolt")
    keys.add("op-1", "ops", "operator")
    return keys


def lines_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_bytes().splitlines()]


async def test_every_outcome_has_one_line_without_prompt_or_key(
    engine: FakeEngine, keys: Keyring, tmp_path: Path
) -> None:
    log = tmp_path / "access.log"
    keys.limit("bolt", requests_per_minute=1)
    acme, bolt = keys.bearer("a-1"), keys.x_api_key("b-1")
    options = {"max_body_bytes": 1000, "max_inflight_per_replica": 1, "queue_size": 1, "first_byte_timeout": 1.0}
    async with running_gateway(engine.url, access_log=str(log), key_file=str(keys.path), **options) as gateway:

        async def ask(body: bytes, headers: list[tuple[str, str]], path: str = CHAT) -> None:
            await answer_to(gateway.port, post(f"{path}?key=secret", body, [*headers, ("x-own", "secret")]))

        await ask(PLAIN, bolt)
        await ask(STREAMED, acme)
        await ask(PLAIN, bolt)  # over its limit
        await ask(PLAIN, [])
        await ask(PLAIN, [("x-api-key", "kvg_secret")])
        await ask(b'{"secret', acme)
        await ask(b'{"model":"secret","messages":[]}', acme)
        await ask(b"secret" * 200, acme)
        await ask(PLAIN, acme, MESSAGES)  # which this engine does not know
        expected = [200, 200, 429, 401, 401, 400, 404, 413, 404]
        for broken in (
            behaviours.status(500, b'{"error":"secret"}'),
            behaviours.garbage(),
            behaviours.stall_before_head(),
            Stream(["secret"] * 3, stop_after=3, stop="cut"),  # its head says 200, and its end does not come
        ):
            engine.script(broken)
            await ask(STREAMED, acme)
        expected += [500, 502, 504, 502]
        await leave_and_fill_the_queue(gateway, engine, post(CHAT, PLAIN, acme))
        expected += [499, 499, 503, 200, 200]
    lines = lines_of(log)
    assert sorted(line["status"] for line in lines) == sorted(expected)
    assert len({line["request_id"] for line in lines}) == len(lines)
    assert gateway.metric("kvgate_requests_total") == len(lines)
    text = log.read_text()
    assert "secret" not in text
    assert not [secret for secret in keys.secrets.values() if secret.removeprefix("kvg_") in text]
    reasons = {(line["status"], line["reason"]) for line in lines if line["reason"]}
    assert reasons == {(429, "requests"), (503, "queue_full")}
    owners = {(line["tenant"], line["key_id"]) for line in lines if line["status"] != 401}
    assert owners == {("acme", "a-1"), ("bolt", "b-1")}
    assert {(line["tenant"], line["key_id"]) for line in lines if line["status"] == 401} == {("", None)}
    (cut,) = [line for line in lines if line["status"] == 502 and line["output_tokens"]]
    assert (cut["stream"], cut["output_tokens"], cut["prompt_tokens"]) == (True, 2, None)


async def leave_and_fill_the_queue(gateway: RunningGateway, engine: FakeEngine, request: bytes) -> None:
    """A client leaves while it waits and one while it is served; then two are served, and a third finds the queue full."""
    gate = asyncio.Event()
    queues = gateway.gateway.queues
    before = len(engine.posts)
    engine.script(behaviours.gated(asyncio.Event()), behaviours.gated(gate))
    running, waiting = [await RawClient.connect(gateway.port) for _ in range(2)]
    await running.send(request)
    await engine.received(before + 1)
    await waiting.send(request)
    await until(lambda: queues.waiting == 1)
    waiting.close()
    await until(lambda: queues.waiting == 0)
    running.reset()
    await until(lambda: queues.running == 0)
    async with await RawClient.connect(gateway.port) as running, await RawClient.connect(gateway.port) as waiting:
        await running.send(request)
        await engine.received(before + 2)
        await waiting.send(request)
        await until(lambda: queues.waiting == 1)
        assert (await answer_to(gateway.port, request)).status == 503
        gate.set()
        for client in (running, waiting):
            assert (await client.read_response()).status == 200


async def test_usage_is_counted_once_and_shown_to_its_tenant(engine: FakeEngine, keys: Keyring) -> None:
    acme, bolt, operator = keys.bearer("a-1"), keys.x_api_key("b-1"), keys.bearer("op-1")
    asks_for_usage = SHORT[:-1] + b',"stream":true,"stream_options":{"include_usage":true}}'
    async with running_gateway(engine.url, key_file=str(keys.path)) as gateway:

        async def report(headers: list[tuple[str, str]]) -> dict[str, dict[str, Any]]:
            answer = await answer_to(gateway.port, get("/kv/usage", headers))
            assert answer.status == 200
            return {tenant["tenant"]: tenant for tenant in json.loads(answer.body)["tenants"]}

        assert [tenant["requests"] for tenant in (await report(acme)).values()] == [0]
        for body in (SHORT, STREAM, asks_for_usage):  # the engine says 64 in, 32 of them cached, 3 out, each time
            answer = await answer_to(gateway.port, post(CHAT, body, acme))
            assert (b'"usage"' in answer.body) == (body != STREAM)
        # Anthropic's dialect tells the input at the beginning of a stream and the output at its end
        events = [
            ("message_start", {"message": {"usage": {**USAGES[MESSAGES], "output_tokens": 0}}}),
            ("content_block_delta", {"delta": {"type": "text_delta", "text": "hi"}}),
            ("message_delta", {"usage": USAGES[MESSAGES]}),
            ("message_stop", {}),
        ]
        stream = b"".join(
            f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode() for name, data in events
        )
        engine.script(Whole(body=stream, headers=[behaviours.EVENT_STREAM]))
        engine.script(Stream(["w"] * 9, stop_after=6, stop="reset"))  # a role, then five tokens
        await answer_to(gateway.port, post(MESSAGES, minimal(MESSAGES, stream=True), bolt))
        assert not (await answer_to(gateway.port, post(CHAT, STREAM, bolt))).complete
        assert (await answer_to(gateway.port, post(CHAT, b"{", bolt))).status == 400

        mine, theirs, all_of_them = await report(acme), await report(bolt), await report(operator)
        assert (mine.keys(), theirs.keys()) == ({"acme"}, {"bolt"})
        assert all_of_them == {**mine, **theirs}
        assert [model["model"] for model in mine["acme"]["models"]] == ["tiny"]
        names = ("requests", "prompt_tokens_known", "cached_tokens", "written_tokens", "output_tokens")
        assert [mine["acme"][name] for name in names] == [3, 3 * 64, 3 * 32, 3 * 32, 3 * 3]
        assert [theirs["bolt"][name] for name in names] == [3, 100, 64, 36, 7 + 5]
        for tenant, report_of in (("acme", mine), ("bolt", theirs)):
            shown = report_of[tenant]
            assert gateway.metric("kvgate_output_tokens_total", tenant=tenant) == shown["output_tokens"]
            assert gateway.metric("kvgate_prefix_tokens_total", tenant=tenant) == shown["cached_tokens"]
            assert gateway.metric("kvgate_requests_total", tenant=tenant) == shown["requests"]


async def test_a_trace_goes_on_at_the_engine(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = [("traceparent", f"00-{TRACE}-{SPAN}-01"), ("tracestate", "a=1")]
    async with running_gateway(engine.url) as gateway:
        await answer_to(gateway.port, post(CHAT, PLAIN, parent))
        await answer_to(gateway.port, post(CHAT, PLAIN))
    assert [header for header in engine.posts[0].headers if header[0].startswith("trace")] == parent
    assert engine.posts[1].header("traceparent") is None  # none is made up

    log = tmp_path / "access.log"
    with collector() as (url, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        async with running_gateway(engine.url, tracing="otlp", access_log=str(log)) as gateway:
            await answer_to(gateway.port, post(CHAT, PLAIN, parent))
            await answer_to(gateway.port, post(CHAT, PLAIN))
    continued, begun = [str(post.header("traceparent")).split("-") for post in engine.posts[2:]]
    assert (continued[1], engine.posts[2].header("tracestate")) == (TRACE, "a=1")
    assert begun[1] != TRACE
    assert SPAN not in (continued[2], begun[2])  # the engine's parent is the gateway's span
    assert [line["trace_id"] for line in lines_of(log)] == [TRACE, begun[1]]
    spans = {
        (span.trace_id.hex(), span.span_id.hex())
        for batch in received
        for span in batch.resource_spans[0].scope_spans[0].spans
    }
    assert spans == {(continued[1], continued[2]), (begun[1], begun[2])}
