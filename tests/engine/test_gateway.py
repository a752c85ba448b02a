"""The gateway in front of the real engine, spoken to with OpenAI's own SDK."""

from __future__ import annotations

import re
import secrets
import time
import urllib.request
from collections.abc import Iterator

import httpx2
import openai
import pytest

from server.engines.launch import RunningEngine
from tests.server.process import GatewayProcess, gateway_process


@pytest.fixture(scope="module")
def gateway(engine: RunningEngine) -> Iterator[GatewayProcess]:
    with gateway_process("--engine", engine.url, "--scrape-interval", "0.2") as running:
        yield running


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60) as sdk:
        yield sdk


def fresh(words: int = 400) -> str:
    """A prompt that nobody sent before."""
    return f"{secrets.token_hex(8)} " + "the quick brown fox jumps over the lazy dog " * (words // 9)


def page(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        return str(response.read().decode())


def total(text: str, name: str, **labels: str) -> float:
    found = 0.0
    for line in text.splitlines():
        match = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line)
        if (
            match
            and match[1] == name
            and labels.items() <= dict(re.findall(r'(\w+)="([^"]*)"', match[2] or "")).items()
        ):
            found += float(match[3])
    return found


def test_chat(client: openai.OpenAI, engine: RunningEngine) -> None:
    answer = client.chat.completions.create(
        model=engine.model, messages=[{"role": "user", "content": "Say hello."}], max_tokens=8
    )
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8


def test_completion(client: openai.OpenAI, engine: RunningEngine) -> None:
    answer = client.completions.create(model=engine.model, prompt="Once upon a time", max_tokens=5)
    assert answer.choices[0].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_stream_with_usage(client: openai.OpenAI, engine: RunningEngine) -> None:
    stream = client.chat.completions.create(
        model=engine.model,
        messages=[{"role": "user", "content": "Count to ten."}],
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert len(chunks) > 6  # token by token, not at the end


def test_a_repeated_prompt_is_delivered_from_the_cache(
    client: openai.OpenAI, engine: RunningEngine, gateway: GatewayProcess
) -> None:
    prompt = fresh()
    before = total(page(gateway.url), "kvgate_prefix_tokens_total", stage="delivered")
    headers, cached = [], []
    for _ in range(2):
        raw = client.completions.with_raw_response.create(model=engine.model, prompt=prompt, max_tokens=1)
        usage = raw.parse().usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        headers.append(raw.headers["x-kvgate-delivered-tokens"])
        cached.append(usage.prompt_tokens_details.cached_tokens or 0)
        expected = (usage.prompt_tokens - 1) // 32 * 32
    assert cached == [0, expected]
    assert headers == ["0", str(expected)]
    assert total(page(gateway.url), "kvgate_prefix_tokens_total", stage="delivered") - before == expected


def test_models(client: openai.OpenAI, engine: RunningEngine) -> None:
    assert engine.model in [model.id for model in client.models.list()]


def test_errors_are_the_sdk_s_own(client: openai.OpenAI, engine: RunningEngine) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="no-such-model", prompt="x")
    assert unknown.value.code == "model_not_found"
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError):  # the engine's own judgement, passed on
        client.completions.create(model=engine.model, prompt="x", max_tokens=-1)
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=engine.model, messages="hi")  # type: ignore[arg-type]
    assert wrong.value.param == "messages"


class Aborts:
    """Shows that the engine stopped early: it is idle, and has generated less than it was asked for."""

    def __init__(self, engine: RunningEngine) -> None:
        self._engine = engine
        self._before = self._count()[1]

    def _count(self) -> tuple[float, float]:
        text = page(self._engine.url)
        busy = total(text, "vllm:num_requests_running") + total(text, "vllm:num_requests_waiting")
        return busy, total(text, "vllm:generation_tokens_total")

    def wait(self, asked: int, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while (count := self._count())[0] and time.monotonic() < end:
            time.sleep(0.1)
        busy, generated = count
        assert busy == 0
        assert generated - self._before < asked


LONG = {"ignore_eos": True, "min_tokens": 3000}


def test_leaving_a_stream_aborts_the_engine_s_work(client: openai.OpenAI, engine: RunningEngine) -> None:
    aborts = Aborts(engine)
    stream = client.completions.create(
        model=engine.model, prompt="Tell me everything.", max_tokens=3000, stream=True, extra_body=LONG
    )
    for _, _ in zip(range(3), stream, strict=False):
        pass
    stream.close()
    aborts.wait(3000)


def test_leaving_without_a_stream_aborts_the_engine_s_work(client: openai.OpenAI, engine: RunningEngine) -> None:
    aborts = Aborts(engine)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=httpx2.Timeout(30, read=1.0)).completions.create(
            model=engine.model, prompt="Tell me everything.", max_tokens=3000, extra_body=LONG
        )
    aborts.wait(3000)


def test_leaving_before_the_first_byte_aborts_the_engine_s_work(
    client: openai.OpenAI, engine: RunningEngine, gateway: GatewayProcess
) -> None:
    """Gone while the engine still reads the prompt: nothing of the answer had come."""
    aborts = Aborts(engine)
    before = total(page(gateway.url), "kvgate_requests_total", code="499")
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=httpx2.Timeout(30, read=0.1)).completions.create(
            model=engine.model, prompt=fresh(2500), max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
    aborts.wait(500)
    assert total(page(gateway.url), "kvgate_requests_total", code="499") == before + 1


def test_the_gateway_shows_the_engine_s_kv_utilization(
    client: openai.OpenAI, engine: RunningEngine, gateway: GatewayProcess
) -> None:
    stream = client.completions.create(
        model=engine.model, prompt=fresh(2000), max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    seen = 0.0
    end = time.monotonic() + 20
    while seen == 0 and time.monotonic() < end:
        seen = total(page(gateway.url), "kvgate_kv_utilization_ratio")
        time.sleep(0.05)
    stream.close()
    assert 0 < seen < 1
