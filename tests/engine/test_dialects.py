"""Both dialects through the gateway to the real engine, spoken by the providers' own SDKs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import openai
import pytest

from server.engines.launch import RunningEngine
from tests.engine.test_gateway import fresh, page, total
from tests.server.process import GatewayProcess, gateway_process

SHARED = "claude-opus-5"  # an alias of the engine's model


@pytest.fixture(scope="module")
def gateway(engine: RunningEngine) -> Iterator[GatewayProcess]:
    with gateway_process("--engine", engine.url, "--aliases", f"claude-*={engine.model},gpt-4o={engine.model}") as it:
        yield it


@pytest.fixture
def claude(gateway: GatewayProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=60) as sdk:
        yield sdk


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60) as sdk:
        yield sdk


def test_messages_with_system_blocks_and_cache_control(claude: anthropic.Anthropic, gateway: GatewayProcess) -> None:
    long = fresh()
    read = []
    before = total(page(gateway.url), "kvgate_prefix_tokens_total", stage="delivered")
    for question in ("Who are you?", "What is new?"):
        answer = claude.messages.create(
            model=SHARED,
            max_tokens=8,
            system=[
                {"type": "text", "text": "Be brief."},
                {"type": "text", "text": long, "cache_control": {"type": "ephemeral"}},
            ],
            messages=[{"role": "user", "content": [{"type": "text", "text": question}]}],
        )
        assert answer.content[0].type == "text"
        read.append(answer.usage.cache_read_input_tokens or 0)
    assert read[0] < 64 < read[1]
    assert total(page(gateway.url), "kvgate_prefix_tokens_total", stage="delivered") - before == sum(read)


def test_messages_stream(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(
        model=SHARED, max_tokens=10, messages=[{"role": "user", "content": "Count to ten."}]
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text
    assert 0 < final.usage.output_tokens <= 10


def test_count_tokens(claude: anthropic.Anthropic) -> None:
    count = claude.messages.count_tokens(model=SHARED, messages=[{"role": "user", "content": "one two three"}])
    assert count.input_tokens > 3


def test_errors_of_messages(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(model="gpt-9", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    assert unknown.value.request_id
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model=SHARED, max_tokens=1, messages="x")  # type: ignore[arg-type]


def test_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="gpt-4o", input=fresh(100), max_output_tokens=16)
    assert answer.output
    assert answer.usage is not None
    assert answer.usage.input_tokens > 50
    events = list(client.responses.create(model="gpt-4o", input="Hello", max_output_tokens=16, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_unknown")


def test_tools(client: openai.OpenAI) -> None:
    function = {
        "name": "weather",
        "description": "The weather in a city",
        "strict": True,  # or the engine takes any JSON for arguments
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
    answer = client.chat.completions.create(
        model="gpt-4o",
        messages=[{"role": "user", "content": "How is the weather in Rome?"}],
        tools=[{"type": "function", "function": function}],  # type: ignore[list-item,typeddict-item]
        tool_choice={"type": "function", "function": {"name": "weather"}},
        temperature=0,
        max_tokens=100,
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "weather"
    assert "city" in json.loads(call.function.arguments)


def test_a_stream_that_did_not_ask_for_usage_is_counted_and_sees_none(
    client: openai.OpenAI, gateway: GatewayProcess
) -> None:
    before = total(page(gateway.url), "kvgate_output_tokens_total")
    chunks = list(
        client.chat.completions.create(
            model="gpt-4o", messages=[{"role": "user", "content": "Count."}], max_tokens=9, stream=True,
            extra_body={"ignore_eos": True},
        )
    )  # fmt: skip
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert total(page(gateway.url), "kvgate_output_tokens_total") - before == 9


def test_tokenize_and_detokenize(client: openai.OpenAI, gateway: GatewayProcess) -> None:
    at_root = client.with_options(base_url=gateway.url)
    tokens = at_root.post("/tokenize", body={"model": "gpt-4o", "prompt": "hello world"}, cast_to=object)
    assert isinstance(tokens, dict)
    back = at_root.post("/detokenize", body={"model": "gpt-4o", "tokens": tokens["tokens"]}, cast_to=object)
    assert back == {"prompt": "hello world"}
