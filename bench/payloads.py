"""The bytes of the benchmark: request bodies, the upstream's answers, and the stream that every client must receive."""

from __future__ import annotations

import json

MODEL = "bench"
TEXT = "It costs little."
CHAT = "/v1/chat/completions"
KEY = "kvg_" + "bench" + "0" * 38  # every request carries it; a target may check it
STREAM_CHUNKS = 64
STREAM_PERIOD_MS = 10
GROUPS = 64  # prefix groups of the request bodies
# replaced by text of fixed width for each request, so that Content-Length is the same for all
GROUP, SERIAL = "@GROUP@", "@SERIAL@"
GROUP_WIDTH, SERIAL_WIDTH = 3, 10


def request_template(size: int) -> str:
    """A non-streamed chat request of `size` bytes once filled: one of 64 prefixes, a unique end."""
    frame = '{"model":"%s","temperature":0,"max_tokens":16,"messages":[{"role":"system","content":"Group %s. %s"},'
    frame += '{"role":"user","content":"Request %s"}]}'
    empty = frame % (MODEL, "g" * GROUP_WIDTH, "", "s" * SERIAL_WIDTH)
    if size < len(empty):
        raise ValueError(f"a body has at least {len(empty)} bytes")
    words = "A gateway should cost little next to what it saves. "
    filler = (words * (size // len(words) + 1))[: size - len(empty)]
    return frame % (MODEL, GROUP, filler, SERIAL)


def filled(template: str, serial: int) -> bytes:
    group = f"{serial % GROUPS:0{GROUP_WIDTH}d}"
    return template.replace(GROUP, group).replace(SERIAL, f"{serial:0{SERIAL_WIDTH}d}").encode()


def stream_request(serial: int) -> bytes:
    """A streamed chat request that asks for usage, so that a gateway has no event to hide."""
    body = json.loads(filled(request_template(290), serial))
    return json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()


def usage(output: int) -> dict[str, object]:
    return {
        "prompt_tokens": 64,
        "total_tokens": 64 + output,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": 32},
    }


def answer() -> bytes:
    """The upstream's non-streamed answer, as vLLM shapes it."""
    message = {"role": "assistant", "content": TEXT}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    frame = {"id": "chatcmpl-bench", "object": "chat.completion", "created": 1_700_000_000, "model": MODEL}
    return json.dumps({**frame, "choices": [choice], "usage": usage(4)}).encode()


def text_of(answer: bytes) -> str | None:
    """The text of a non-streamed answer; None if it is no such answer."""
    try:
        return str(json.loads(answer)["choices"][0]["message"]["content"])
    except (ValueError, KeyError, IndexError, TypeError):
        return None


def stream_events() -> list[bytes]:
    """The SSE bytes of each of the 64 timed chunks; the last one also carries usage and [DONE]."""
    frame = {"id": "chatcmpl-bench", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": MODEL}

    def event(content: dict[str, object]) -> bytes:
        return b"data: " + json.dumps({**frame, **content}, separators=(",", ":")).encode() + b"\n\n"

    def delta(delta: dict[str, str], finish: str | None = None) -> bytes:
        return event({"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]})

    events = [delta({"role": "assistant", "content": ""})]
    events += [delta({"content": f" word{n}"}) for n in range(STREAM_CHUNKS - 2)]
    last = delta({}, "stop") + event({"choices": [], "usage": usage(STREAM_CHUNKS - 2)}) + b"data: [DONE]\n\n"
    return [*events, last]


def models() -> bytes:
    card = {"id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "vllm", "max_model_len": 131072}
    return json.dumps({"object": "list", "data": [card]}).encode()


def metrics() -> bytes:
    """Enough of vLLM's exposition for a gateway that reads it."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    lines = [f'# TYPE {name} gauge\n{name}{{engine="0",model_name="{MODEL}"}} 0.0\n' for name in names]
    return "".join(lines).encode()
