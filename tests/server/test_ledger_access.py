"""Who may see what the ledger knows: a tenant its own numbers, an operator all of them and the reasons of each choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fakes.engine import FakeEngine
from tests.fakes.raw_client import Response, get, post
from tests.server.keyring import Headers, Keyring, answer_to
from tests.server.running import RunningGateway, running_gateway

BODY = b'{"model":"tiny","prompt":"one two three","max_tokens":1}'
DEBUG = [("x-kvgate-debug", "decision")]


async def complete(gateway: RunningGateway, headers: Headers) -> Response:
    answer = await answer_to(gateway.port, post("/v1/completions", BODY, [*headers, *DEBUG]))
    assert answer.status == 200
    return answer


async def ledger(gateway: RunningGateway, headers: Headers) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((await answer_to(gateway.port, get("/kv/ledger", headers))).body)
    return body


async def test_a_tenant_sees_its_own_and_no_engine(engine: FakeEngine, tmp_path: Path) -> None:
    keys = Keyring(tmp_path / "keys")
    for key, tenant in (("a", "acme"), ("b", "bolt")):
        keys.add(key, tenant)
    keys.add("op", "ops", "operator")
    acme, bolt, operator = (keys.bearer(key) for key in ("a", "b", "op"))
    async with running_gateway(
        engine.url, policy="cost", kv_events="off", key_file=str(keys.path), isolation="shared"
    ) as gateway:
        assert (await complete(gateway, acme)).header("x-kvgate-decision") is None
        for _ in range(2):
            await complete(gateway, bolt)
        explained = (await complete(gateway, operator)).header("x-kvgate-decision")
        assert explained is not None
        assert explained.startswith(f"127.0.0.1:{engine.port};")

        for headers, tenant, requests in ((acme, "acme", 1), (bolt, "bolt", 2)):
            seen = await ledger(gateway, headers)
            assert "index" not in seen
            (row,) = seen["rows"]
            assert (row["tenant"], row["unmatched_prompt_tokens"]) == (tenant, requests * engine.prompt_tokens)
            assert (await answer_to(gateway.port, get("/kv/replicas", headers))).status == 403
        everything = await ledger(gateway, operator)
        assert [row["tenant"] for row in everything["rows"]] == ["acme", "bolt", "ops"]
        assert "index" in everything
        assert (await answer_to(gateway.port, get("/kv/ledger", []))).status == 401
