"""Pages of other origins: what a browser is told, on answers and on errors, over a real socket."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes import behaviours, wire
from tests.fakes.engine import FakeEngine, refused_port
from tests.fakes.raw_client import RawClient, Response, get, post
from tests.server.exchange.test_dialects import MESSAGES, minimal
from tests.server.keyring import Headers, Keyring, answer_to
from tests.server.load import CHAT, PLAIN, STREAM
from tests.server.running import RunningGateway, running_gateway

OURS, OTHER = "https://app.example.org", "https://evil.example.org"


def preflight(path: str, origin: str, method: str = "POST") -> bytes:
    asked = f"access-control-request-method: {method}\r\naccess-control-request-headers: authorization,content-type\r\n"
    return f"OPTIONS {path} HTTP/1.1\r\nhost: t\r\norigin: {origin}\r\n{asked}\r\n".encode()


def allowed(answer: Response) -> str | None:
    """The origin that may read the answer. Caches are told that it depends on who asks."""
    origins = wire.values(answer.headers, "access-control-allow-origin")
    assert len(origins) <= 1
    assert "Origin" in ", ".join(wire.values(answer.headers, "vary"))
    assert answer.header("access-control-allow-credentials") is None
    return origins[0] if origins else None


async def from_page(gateway: RunningGateway, request: bytes, origin: str) -> Response:
    head, _, body = request.partition(b"\r\n\r\n")
    return await answer_to(gateway.port, head + f"\r\norigin: {origin}\r\n\r\n".encode() + body)


async def test_a_preflight(engine: FakeEngine, tmp_path: Path) -> None:
    keys = Keyring(tmp_path / "keys")  # a browser sends no key with it
    async with running_gateway(engine.url, cors_origins=OURS, key_file=str(keys.path)) as gateway:
        for method, path in (("POST", CHAT), ("POST", MESSAGES), ("GET", "/v1/models"), ("GET", "/kv/usage")):
            answer = await answer_to(gateway.port, preflight(path, OURS, method))
            assert (answer.status, allowed(answer)) == (200, OURS)
            assert method in str(answer.header("access-control-allow-methods"))
            assert str(answer.header("access-control-allow-headers")).lower() == "authorization,content-type"
            assert allowed(await answer_to(gateway.port, preflight(path, OTHER, method))) is None


async def test_answers_and_errors_may_be_read_by_the_configured_origin_alone(
    engine: FakeEngine, tmp_path: Path
) -> None:
    keys = Keyring(tmp_path / "keys")
    keys.add("k")
    keys.add("slow", "slow")
    keys.limit("slow", requests_per_minute=1)
    key, slow = keys.bearer("k"), keys.bearer("slow")
    options = {"cors_origins": f"{OURS}, https://b.example.org", "key_file": str(keys.path), "max_body_bytes": 1000}
    async with running_gateway(engine.url, **options) as gateway:
        assert (await answer_to(gateway.port, post(CHAT, PLAIN, slow))).status == 200  # all that it may
        requests: list[tuple[int, str, bytes, Headers]] = [
            (200, CHAT, PLAIN, key),
            (200, CHAT, STREAM, key),
            (401, CHAT, PLAIN, []),
            (400, CHAT, b"{", key),
            (404, CHAT, b'{"model":"none","messages":[]}', key),
            (404, "/none", b"{}", key),
            (413, CHAT, b"x" * 2000, key),
            (429, CHAT, PLAIN, slow),
            (502, CHAT, PLAIN, key),
        ]
        for status, path, body, headers in requests:
            for origin, expected in ((OURS, OURS), (OTHER, None)):
                if status == 502:
                    engine.script(behaviours.garbage())
                answer = await from_page(gateway, post(path, body, headers), origin)
                assert (answer.status, allowed(answer)) == (status, expected), (path, origin)
                exposed = str(answer.header("access-control-expose-headers")) if expected else ""
                assert not expected or {"x-request-id", "x-kvgate-reason", "retry-after"} <= set(exposed.split(", "))
        for status, path, headers in ((200, "/v1/models", key), (401, "/v1/models", []), (403, "/metrics", key)):
            answer = await from_page(gateway, get(path, headers), OURS)
            assert (answer.status, allowed(answer)) == (status, OURS)
            assert allowed(await from_page(gateway, get(path, headers), OTHER)) is None


async def test_an_error_in_a_stream_may_be_read(engine: FakeEngine) -> None:
    engine.script(behaviours.Stream(stop_after=2, stop="cut"))
    async with running_gateway(engine.url, cors_origins="*") as gateway:
        answer = await from_page(gateway, post(CHAT, STREAM), OTHER)
        assert (answer.status, answer.complete, allowed(answer)) == (200, False, "*")
        assert json.loads(answer.events[-1])["error"]["code"] == "engine_failed"


async def test_no_engine_may_be_read_about() -> None:
    with refused_port() as port:
        async with running_gateway(f"http://127.0.0.1:{port}", cors_origins=OURS) as gateway:
            for request in (post(MESSAGES, minimal(MESSAGES)), get("/v1/models"), get("/health/ready")):
                answer = await from_page(gateway, request, OURS)
                assert (answer.status, allowed(answer)) == (503, OURS)


async def test_a_fault_of_the_gateway_s_own_may_be_read(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_gateway(engine.url, cors_origins=OURS) as gateway:
        monkeypatch.setattr(type(gateway.gateway), "listed_models", lambda _: 1 / 0)
        answer = await from_page(gateway, get("/v1/models"), OURS)
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (500, "internal_error")
        assert allowed(answer) == OURS


async def test_without_configured_origins_no_page_is_told_anything(engine: FakeEngine) -> None:
    async with running_gateway(engine.url) as gateway:
        answer = await answer_to(gateway.port, preflight(CHAT, OURS))
        assert answer.status == 405
        async with await RawClient.connect(gateway.port) as client:
            for request in (post(CHAT, PLAIN, [("origin", OURS)]), get("/v1/models", [("origin", OURS)])):
                await client.send(request)
                got = await client.read_response()
                assert got.status == 200
                assert not [name for name, _ in (*answer.headers, *got.headers) if name.startswith("access-control")]
