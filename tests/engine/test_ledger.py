"""The ledger on the real engine: what is predicted at dispatch is what vLLM delivers."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from server.engines.launch import RunningEngine
from tests.server.process import GatewayProcess, gateway_process

WORDS = [
    "time",
    "house",
    "river",
    "green",
    "quickly",
    "under",
    "seven",
    "morning",
    "paper",
    "never",
    "window",
    "apple",
    "some",
    "between",
    "while",
    "until",
]
REQUESTS = 300
AT_ONCE = 6
PATIENCE = 60.0  # s


@pytest.fixture(scope="module")
def gateway(engine: RunningEngine) -> Iterator[GatewayProcess]:
    """With the ledger and the engine's own events, tested by itself already."""
    assert engine.events is not None
    events = f"{engine.url.removeprefix('http://')}={engine.events.setting()}"
    with gateway_process("--engine", engine.url, "--scrape-interval", "0.2", "--kv-events", events) as running:
        for _ in range(round(PATIENCE / 0.1)):
            if replica(running)["self_test"] is not None:
                break
            time.sleep(0.1)
        yield running


def get(gateway: GatewayProcess, path: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx2.get(f"{gateway.url}{path}", timeout=10).raise_for_status().json()
    return answer


def replica(gateway: GatewayProcess) -> dict[str, Any]:
    state: dict[str, Any] = get(gateway, "/kv/replicas")["replicas"][0]
    return state


def test_the_self_test_is_green(gateway: GatewayProcess) -> None:
    verdict = replica(gateway)["self_test"]
    assert verdict["ok"], verdict
    assert verdict["announced_tokens"] == verdict["predicted_tokens"] == verdict["delivered_tokens"] == 96


def text(random_: random.Random, words: int) -> str:
    return " ".join(random_.choice(WORDS) for _ in range(words))


def mixed_requests(model: str, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Chats with shared system prompts, follow-up turns, tools, Anthropic's messages, completions of text and of ids, salts."""
    r, nonce = random.Random(seed), secrets.token_hex(6)
    systems = [f"{nonce} {n} {text(r, 150 + 40 * n)}" for n in range(5)]
    talks: list[list[dict[str, str]]] = [[] for _ in range(12)]
    ids = [[r.randrange(1000, 30000) for _ in range(300)] for _ in range(3)]
    tool = {
        "type": "function",
        "function": {"name": "look", "description": text(r, 30), "parameters": {"type": "object"}},
    }
    made = []
    for _ in range(REQUESTS):
        kind = r.randrange(8)
        body: dict[str, Any] = {"model": model, "max_tokens": r.randrange(1, 6), "temperature": 0}
        if r.random() < 0.5:
            body["stream"] = True
        if r.random() < 0.15:
            body["cache_salt"] = f"{nonce}-{r.randrange(2)}"
        system = r.choice(systems)
        if kind < 4:
            talk = talks[r.randrange(len(talks))]
            talk.append({"role": "user", "content": text(r, r.randrange(3, 60))})
            messages = [{"role": "system", "content": systems[talks.index(talk) % 5]}, *talk]
            talk.append({"role": "assistant", "content": text(r, 12)})
            made.append(("/v1/chat/completions", body | {"messages": list(messages)}))
        elif kind == 4:
            messages = [{"role": "system", "content": system}, {"role": "user", "content": text(r, 20)}]
            made.append(("/v1/chat/completions", body | {"messages": messages, "tools": [tool]}))
        elif kind == 5:
            blocks = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
            messages = [{"role": "user", "content": text(r, 25)}]
            made.append(("/v1/messages", body | {"system": blocks, "messages": messages}))
        elif kind == 6:
            made.append(("/v1/completions", body | {"prompt": system + text(r, r.randrange(60))}))
        else:
            prompt = r.choice(ids)[: r.randrange(40, 300)] + [r.randrange(1000, 30000) for _ in range(20)]
            made.append(("/v1/completions", body | {"prompt": prompt}))
    return made


async def send_all(gateway: GatewayProcess, requests: list[tuple[str, dict[str, Any]]]) -> None:
    """In order, some at once."""
    waiting = iter(requests)

    async def work(client: httpx2.AsyncClient) -> None:
        for path, body in waiting:
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text

    async with httpx2.AsyncClient(base_url=gateway.url, timeout=120) as client:
        await asyncio.gather(*(work(client) for _ in range(AT_ONCE)))


async def test_what_is_routed_is_delivered(gateway: GatewayProcess, engine: RunningEngine) -> None:
    before, rows_before = replica(gateway)["prediction"], totals(gateway)
    await send_all(gateway, mixed_requests(engine.model, seed=7))
    after, rows = replica(gateway)["prediction"], totals(gateway)
    judged = after["requests"] - before["requests"]
    exact = after["exact_requests"] - before["exact_requests"]
    assert judged >= 0.6 * REQUESTS  # the others ran behind a twin whose prefix was still being computed
    assert exact >= 0.99 * judged
    delivered = rows["delivered_tokens"] - rows_before["delivered_tokens"]
    assert delivered > 0.3 * (rows["prompt_tokens"] - rows_before["prompt_tokens"])
    assert rows["unmatched_prompt_tokens"] == rows_before["unmatched_prompt_tokens"]
    assert get(gateway, "/kv/ledger")["index"]["prompts_miscounted"] == 0


def totals(gateway: GatewayProcess) -> dict[str, int]:
    """The ledger's numbers over all models and tenants."""
    names = ("prompt_tokens", "delivered_tokens", "unmatched_prompt_tokens")
    rows = get(gateway, "/kv/ledger")["rows"]
    return {name: sum(row[name] for row in rows) for name in names}


def test_an_answer_tells_what_was_predicted_and_what_came(gateway: GatewayProcess, engine: RunningEngine) -> None:
    prompt = f"{secrets.token_hex(8)} {text(random.Random(1), 200)}"
    body = {"model": engine.model, "prompt": prompt, "max_tokens": 1}
    headers = {"x-kvgate-debug": "decision"}
    answers = [httpx2.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=60) for _ in range(2)]
    assert answers[0].headers["x-kvgate-routed-tokens"] == "0"
    routed = answers[1].headers["x-kvgate-routed-tokens"]
    assert routed == answers[1].headers["x-kvgate-delivered-tokens"] != "0"
    assert f";held={routed};" in answers[1].headers["x-kvgate-decision"]
