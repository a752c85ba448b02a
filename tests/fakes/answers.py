"""What a healthy vLLM answers, as far as a gateway looks at it. The shapes follow vLLM 0.32."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.fakes import wire

if TYPE_CHECKING:
    from tests.fakes.connection import Received, Writer
    from tests.fakes.engine import Behaviour, FakeEngine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CREATED = 1_700_000_000


def usage(prompt: int, output: int, cached: int | None) -> dict[str, Any]:
    """`cached` None is an engine without --enable-prompt-tokens-details."""
    details = None if cached is None else {"cached_tokens": cached}
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + output,
        "completion_tokens": output,
        "prompt_tokens_details": details,
    }


def error(status: int, message: str, kind: str = "BadRequestError") -> bytes:
    """vLLM's error body."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()


def json_head(length: int, status: int = 200, extra: tuple[tuple[str, str], ...] = ()) -> bytes:
    headers = [("server", "uvicorn"), ("content-length", str(length)), ("content-type", "application/json"), *extra]
    return wire.head(status, headers)


def completion_body(path: str, model: str, texts: list[str], usage: dict[str, Any] | None) -> bytes:
    """A whole non-streamed answer."""
    text = "".join(texts)
    chat = path == CHAT
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "stop"}
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return json.dumps(
        {
            "id": "chatcmpl-fake" if chat else "cmpl-fake",
            "object": "chat.completion" if chat else "text_completion",
            "created": CREATED,
            "model": model,
            "choices": [choice],
            "usage": usage,
        }
    ).encode()


def stream_payloads(path: str, model: str, texts: list[str], final_usage: dict[str, Any] | None) -> list[bytes]:
    """The data of each SSE event, [DONE] not included: role (chat only), texts, finish, and usage unless it is None."""
    chat = path == CHAT
    frame = {
        "id": "chatcmpl-fake" if chat else "cmpl-fake",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": CREATED,
        "model": model,
    }

    def payload(delta: dict[str, Any], finish: str | None = None) -> bytes:
        inner = {"delta": delta} if chat else {"text": delta.get("content", "")}
        choices = [{"index": 0, **inner, "logprobs": None, "finish_reason": finish}]
        return json.dumps({**frame, "choices": choices}, separators=(",", ":"), ensure_ascii=False).encode()

    events = [payload({"role": "assistant", "content": ""})] if chat else []
    events += [payload({"content": text}) for text in texts]
    events.append(payload({}, "stop"))
    if final_usage is not None:
        events.append(json.dumps({**frame, "choices": [], "usage": final_usage}, separators=(",", ":")).encode())
    return events


def completion(engine: FakeEngine) -> Behaviour:
    """The default for a POST: a stream where the body asks for one, else a whole answer."""
    from tests.fakes.behaviours import Stream, Whole  # they build on this module

    async def behaviour(request: Received, writer: Writer) -> None:
        if request.path.partition("?")[0] not in (CHAT, TEXT):
            await send_json(writer, 404, b'{"detail":"Not Found"}')
            return
        try:
            asked = json.loads(request.body)
        except ValueError:
            await send_json(writer, 400, error(400, "body is not JSON"))
            return
        if asked.get("model", engine.model) != engine.model:
            await send_json(writer, 404, error(404, "The model does not exist.", "NotFoundError"))
            return
        kind = Stream if asked.get("stream") else Whole
        answer = kind(prompt_tokens=engine.prompt_tokens, cached_tokens=engine.cached_tokens)
        await answer(request, writer)

    return behaviour


def plain(engine: FakeEngine, method: str, path: str) -> Behaviour:
    """The default for everything that is not a POST."""

    async def behaviour(request: Received, writer: Writer) -> None:
        if method != "GET":
            await send_json(writer, 405, b'{"detail":"Method Not Allowed"}')
        elif path == "/health":
            await writer.send(wire.head(200, [("server", "uvicorn"), ("content-length", "0")]))
        elif path == "/version":
            await send_json(writer, 200, b'{"version":"0.32.0"}')
        elif path == "/v1/models":
            await send_json(writer, 200, models(engine))
        elif path == "/metrics":
            body = metrics(engine).encode()
            kind = ("content-type", "text/plain; version=0.0.4; charset=utf-8")
            await writer.send(wire.head(200, [("content-length", str(len(body))), kind]) + body)
        else:
            await send_json(writer, 404, b'{"detail":"Not Found"}')

    return behaviour


async def send_json(writer: Writer, status: int, body: bytes) -> None:
    await writer.send(json_head(len(body), status) + body)


def models(engine: FakeEngine) -> bytes:
    card = {
        "id": engine.model,
        "object": "model",
        "created": CREATED,
        "owned_by": "vllm",
        "root": engine.model,
        "parent": None,
        "max_model_len": engine.max_model_len,
    }
    return json.dumps({"object": "list", "data": [card]}).encode()


def metrics(engine: FakeEngine) -> str:
    """vLLM's exposition, reduced. `engine.gauges` replaces or adds values by metric name."""
    labels = f'{{engine="0",model_name="{engine.model}"}}'
    posts = len(engine.posts)
    samples: dict[str, float] = {
        "vllm:num_requests_running": engine.running,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0.0,
        "vllm:prefix_cache_queries_total": posts * engine.prompt_tokens,
        "vllm:prefix_cache_hits_total": posts * engine.cached_tokens,
        "vllm:prompt_tokens_total": posts * engine.prompt_tokens,
    }
    samples |= engine.gauges
    lines = []
    for name, value in samples.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} fake", f"# TYPE {name} {kind}", f"{name}{labels} {float(value)}"]
    config = (
        f'vllm:cache_config_info{{block_size="32",num_gpu_blocks="1000",engine="0",model_name="{engine.model}"}} 1.0'
    )
    lines += ["# HELP vllm:cache_config_info fake", "# TYPE vllm:cache_config_info gauge", config]
    return "\n".join([*lines, ""])
