"""pytest tests/loadtest/sim/test_api.py: a simulated engine on a real socket, with OpenAI's SDK before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from loadtest.sim.fleet import Fleet
from loadtest.sim.replica import Replica
from tests.loadtest.sim.small import SIZE, cached, complete, get, metric, post, settings, until

IDS = list(range(1000, 1100))


@asynccontextmanager
async def replica(**more: Any) -> AsyncIterator[Replica]:
    async with Fleet(settings(**more)) as fleet:
        yield fleet.replicas[0]


@asynccontextmanager
async def sdk(one: Replica) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_a_conversation_hits_what_it_has_said_before() -> None:
    async with replica() as one, sdk(one) as client:
        messages: list[Any] = [{"role": "user", "content": "Tell me a long story about a cat. " * 10}]
        first = await client.chat.completions.create(model="toy", messages=messages, max_tokens=50)
        assert first.usage
        assert first.usage.prompt_tokens_details
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        before = first.usage.total_tokens
        messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "More."}]
        second = await client.chat.completions.create(model="toy", messages=messages, max_tokens=50)
        assert second.usage
        assert second.usage.prompt_tokens_details
        # the last token of an answer is not computed, be it a word or the end
        assert second.usage.prompt_tokens_details.cached_tokens == (before - 1) // SIZE * SIZE


async def test_a_stream_gives_the_same_as_a_whole_answer_and_its_usage_at_the_end() -> None:
    async with replica() as one, sdk(one) as client:
        messages: list[Any] = [{"role": "user", "content": "Hello there, how do you do? " * 4}]
        whole = await client.chat.completions.create(model="toy", messages=messages, max_tokens=20)
        stream = await client.chat.completions.create(
            model="toy", messages=messages, max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
        usage, other = chunks[-1].usage, whole.usage
        assert usage
        assert other
        assert (usage.prompt_tokens, usage.completion_tokens) == (other.prompt_tokens, other.completion_tokens)
        assert usage.prompt_tokens_details
        assert usage.prompt_tokens_details.cached_tokens == (other.prompt_tokens - 1) // SIZE * SIZE


async def test_the_bytes_of_a_stream_are_server_sent_events() -> None:
    async with replica() as one, aiohttp.ClientSession() as session:
        body = {"prompt": IDS, "max_tokens": 3, "stream": True, "ignore_eos": True, "return_token_ids": True}
        async with session.post(f"{one.url}/v1/completions", json=body) as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            events = (await response.read()).split(b"\n\n")
        assert events.pop() == b""
        assert events.pop() == b"data: [DONE]"
        choices = [orjson.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
        assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]
        assert choices[0]["prompt_token_ids"] == IDS
        assert [len(choice["token_ids"]) for choice in choices] == [1, 1, 1]


async def test_continuous_usage_counts_up() -> None:
    async with replica() as one, sdk(one) as client:
        stream = await client.completions.create(
            model="toy",
            prompt=IDS,
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
            extra_body={"ignore_eos": True},
        )
        counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage]
        assert counts == [1, 2, 3, 3]


async def test_salts_and_adapters_keep_prefixes_apart() -> None:
    async with replica() as one:
        hits = [await cached(one.url, IDS, **key) for key in ({}, {}, {"cache_salt": "a"}, {"model": "style"})]
        assert hits == [0, 96, 0, 0]
        assert await cached(one.url, IDS, model="style") == 96
        assert await cached(one.url, IDS, prompt_logprobs=1) == 0


async def test_without_details_the_usage_has_none_and_without_caching_nothing_hits() -> None:
    async with replica(details=False) as one:
        assert (await complete(one.url, IDS))["usage"]["prompt_tokens_details"] is None
    async with replica(prefix_caching=False) as one:
        assert [await cached(one.url, IDS) for _ in range(2)] == [0, 0]


async def test_several_prompts_and_choices() -> None:
    async with replica() as one:
        done = await complete(one.url, [IDS, "Some text"], n=2, return_token_ids=True)
        assert [choice["index"] for choice in done["choices"]] == [0, 1, 2, 3]
        assert [choice["prompt_token_ids"] == IDS for choice in done["choices"]] == [True, True, False, False]
        assert done["choices"][0]["text"] != done["choices"][1]["text"]
        assert done["usage"]["prompt_tokens"] == len(IDS) + 3


async def test_a_stop_string_cuts_the_answer_and_is_never_sent() -> None:
    async with replica() as one, sdk(one) as client:
        more: dict[str, Any] = {"max_tokens": 30, "extra_body": {"ignore_eos": True}}
        plain = await client.completions.create(model="toy", prompt=IDS, **more)
        words = plain.choices[0].text.split(" ")
        stop = f"{words[2][1:]} {words[3][:2]}"  # across two tokens
        cut = await client.completions.create(model="toy", prompt=IDS, stop=stop, **more)
        assert cut.choices[0].text == plain.choices[0].text.split(stop)[0]
        assert cut.choices[0].finish_reason == "stop"
        stream = await client.completions.create(model="toy", prompt=IDS, stop=[stop, "zz"], stream=True, **more)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == cut.choices[0].text
        assert await metric(one.url, "vllm:num_requests_running") == 0
        assert await metric(one.url, "vllm:kv_cache_usage_perc") == 0


async def test_an_answer_ends_by_itself_unless_told_otherwise() -> None:
    async with replica(answer_tokens=5) as one:
        done = await complete(one.url, IDS, max_tokens=100, return_token_ids=True)
        assert done["choices"][0]["finish_reason"] == "stop"
        assert done["usage"]["completion_tokens"] <= 10
        assert len(done["choices"][0]["text"].split()) == done["usage"]["completion_tokens"] - 1
        longer = await complete(one.url, IDS, max_tokens=100, min_tokens=40)
        assert longer["usage"]["completion_tokens"] == 41
        longest = await complete(one.url, IDS, max_tokens=100, ignore_eos=True)
        assert longest["choices"][0]["finish_reason"] == "length"


async def test_an_answer_can_be_given_word_for_word() -> None:
    async with replica() as one:
        script = [2000 + number for number in range(20)]
        done = await complete(one.url, IDS, max_tokens=20, sim_output_tokens=script, return_token_ids=True)
        assert done["choices"][0]["token_ids"] == script
        assert await cached(one.url, [*IDS, *script, 1]) == 112  # 119 tokens were computed


async def test_a_client_that_leaves_frees_its_blocks() -> None:
    async with replica(decode_s=0.001) as one, aiohttp.ClientSession() as session:
        engine = one.engine
        assert engine
        running = engine.scheduler.running
        url, body = f"{one.url}/v1/completions", {"prompt": IDS, "max_tokens": 3000, "ignore_eos": True}
        response = await session.post(url, json=body | {"stream": True})
        await until(lambda: bool(running and running[0].output_count > 2))
        assert engine.scheduler.cache.pool.usage > 0
        response.close()
        await until(lambda: engine.scheduler.cache.pool.usage == 0)
        asking = asyncio.ensure_future(session.post(url, json=body))
        await until(lambda: bool(running and running[0].output_count > 2))
        asking.cancel()
        await until(lambda: engine.scheduler.cache.pool.usage == 0)
        assert engine.metrics.finished["abort"] == 2


async def test_tokenize_and_detokenize_undo_each_other() -> None:
    async with replica() as one:
        text = "Some words, and <|im_end|> 漢字"
        _, done = await post(f"{one.url}/tokenize", {"prompt": text, "return_token_strs": True})
        assert done["count"] == len(done["tokens"]) == len(done["token_strs"])
        assert await post(f"{one.url}/detokenize", {"tokens": done["tokens"]}) == (200, {"prompt": text})
        chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}
        _, done = await post(f"{one.url}/tokenize", chat)
        _, back = await post(f"{one.url}/detokenize", {"tokens": done["tokens"]})
        assert back["prompt"] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        answer = {**chat, "max_tokens": 1}
        assert (await post(f"{one.url}/v1/chat/completions", answer))[1]["usage"]["prompt_tokens"] == done["count"]


async def test_models_version_and_health() -> None:
    async with replica() as one, sdk(one) as client:
        base, adapter = [model async for model in client.models.list()]
        assert base.model_dump()["root"] == "/models/toy"
        assert base.model_dump()["max_model_len"] == 199 * SIZE
        assert (adapter.id, adapter.model_dump()["parent"]) == ("style", "toy")
        assert await get(f"{one.url}/health") == ""
        assert orjson.loads(await get(f"{one.url}/version"))["version"].startswith("0.32")
        assert orjson.loads(await get(f"{one.url}/kv_event_sources")) == {}


async def test_metrics_have_vllms_names_and_true_numbers() -> None:
    async with replica() as one:
        for _ in range(2):
            await complete(one.url, IDS, max_tokens=3, ignore_eos=True)
        expected = {
            "vllm:prefix_cache_queries_total": 200,
            "vllm:prefix_cache_hits_total": 96,
            "vllm:prompt_tokens_total": 200,
            "vllm:prompt_tokens_cached_total": 96,
            "vllm:generation_tokens_total": 6,
            "vllm:request_prefill_kv_computed_tokens_sum": 104,
            "vllm:request_prefill_kv_computed_tokens_count": 2,
            "vllm:request_prefill_time_seconds_count": 2,
            "vllm:time_to_first_token_seconds_count": 2,
            "vllm:inter_token_latency_seconds_count": 4,
            "vllm:num_requests_running": 0,
            "vllm:num_requests_waiting": 0,
            "vllm:kv_cache_usage_perc": 0,
        }
        assert {name: await metric(one.url, name, model_name="toy") for name in expected} == expected
        assert await metric(one.url, "vllm:request_success_total", finished_reason="length") == 2
        info = {"block_size": "16", "num_gpu_blocks": "200", "enable_prefix_caching": "True"}
        assert await metric(one.url, "vllm:cache_config_info", **info) == 1
        assert await metric(one.url, "vllm:request_prompt_tokens_bucket", le="100.0") == 2
        assert await metric(one.url, "vllm:request_prompt_tokens_bucket", le="50.0") == 0


async def test_the_cache_is_reset_only_when_nothing_holds_it() -> None:
    async with replica(decode_s=0.001) as one:
        await complete(one.url, IDS)
        asking = asyncio.create_task(complete(one.url, [7] * 40, max_tokens=300, ignore_eos=True))
        engine = one.engine
        assert engine
        await until(lambda: bool(engine.scheduler.running))
        await post(f"{one.url}/sim/faults", {"stall_s": 3600})
        assert await post(f"{one.url}/reset_prefix_cache") == (200, {"success": False})
        assert await post(f"{one.url}/reset_prefix_cache?reset_running_requests=true") == (200, {"success": True})
        await post(f"{one.url}/sim/faults", {"stall_s": 0})
        assert (await asking)["usage"]["completion_tokens"] == 300
        assert await cached(one.url, IDS) == 0


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        ({"prompt": []}, "non-empty", "prompt"),
        ({"prompt": "x", "max_tokens": 0}, "at least 1", "max_tokens"),
        ({"prompt": [-1]}, "token ids", "prompt"),
        ({"prompt": [1, "x"]}, "token ids", "prompt"),
        ({"prompt": "x", "cache_salt": "a/b"}, "cache_salt", "cache_salt"),
        ({"prompt": "x", "cache_salt": ""}, "non-empty", "cache_salt"),
        ({"prompt": "x", "max_tokens": 10**6}, "max_model_len", "max_tokens"),
        ({"prompt": [1] * 3184}, "maximum context length", "input_tokens"),
        ({"prompt": "x", "stream_options": {}, "priority": 1}, "Priority", "priority"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream=True", "stream_options"),
        ({"prompt": "x", "echo": True}, "echo", "echo"),
    ],
)
async def test_what_cannot_be_is_refused_in_vllms_shape(body: dict[str, Any], said: str, param: str) -> None:
    async with replica() as one:
        status, done = await post(f"{one.url}/v1/completions", body)
        assert (status, done["error"]["code"], done["error"]["type"]) == (400, 400, "BadRequestError")
        assert said in done["error"]["message"]
        assert done["error"]["param"] == param


async def test_unknown_models_paths_and_messages_are_refused() -> None:
    async with replica() as one, sdk(one) as client:
        with pytest.raises(NotFoundError, match="does not exist"):
            await client.completions.create(model="other", prompt="x")
        image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
        with pytest.raises(BadRequestError, match="cannot render this request: media"):
            await client.chat.completions.create(model="toy", messages=image)
        with pytest.raises(BadRequestError, match="cannot render this request: request_template"):
            await client.chat.completions.create(
                model="toy", messages=[{"role": "user", "content": "x"}], extra_body={"chat_template": "{% nonsense"}
            )
        assert (await post(f"{one.url}/v1/nothing"))[1]["error"]["type"] == "NotFoundError"
        async with aiohttp.ClientSession() as session:
            answer = await session.post(f"{one.url}/v1/completions", data=b"{")
            assert answer.status == 400
            assert "not JSON" in await answer.text()


async def test_many_at_once_in_a_small_cache_are_preempted_and_all_answered() -> None:
    async with replica(blocks=40) as one:
        asked = [complete(one.url, [number] * 100, max_tokens=90, ignore_eos=True) for number in range(12)]
        done = await asyncio.gather(*asked)
        assert {answer["usage"]["completion_tokens"] for answer in done} == {90}
        assert await metric(one.url, "vllm:num_preemptions_total") > 0
        assert await metric(one.url, "vllm:kv_cache_usage_perc") == 0
