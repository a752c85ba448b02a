"""What a body asks for, checked as vLLM checks it. Raises Refused with vLLM's words and error shape."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import orjson

from loadtest.sim.hashing import TOKEN, Lora

SALT_FORBIDDEN = frozenset("@/\\\x00")
COMPLETION_TOKENS = 16  # OpenAI's default for max_tokens of /v1/completions
SCRIPT = "sim_output_tokens"  # a field of our own, which vLLM ignores: token ids that the answer begins with

Body = Mapping[str, Any]


@dataclass(eq=False)
class Refused(Exception):
    """An answer in vLLM's error shape."""

    status: int
    message: str
    param: str | None = None

    def body(self) -> bytes:
        kind = {404: "NotFoundError", 503: "ServiceUnavailableError"}.get(self.status, "BadRequestError")
        if self.status >= 500 and self.status != 503:
            kind = "InternalServerError"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return orjson.dumps({"error": error})


@dataclass(frozen=True, slots=True)
class Model:
    """What is served under a name. root: the folder it comes from, or the name again."""

    name: str
    root: str
    max_model_len: int
    loras: Mapping[str, Lora]


@dataclass(frozen=True, slots=True)
class Ask:
    """A generation request. max_tokens: None where the answer ends by itself. script: token ids that it begins with.

    read_cache: False where prompt_logprobs are asked for.
    """

    model: str
    prompts: tuple[array[int], ...]
    max_tokens: int | None
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    ignore_eos: bool
    min_tokens: int
    stop: tuple[str, ...]
    salt: str | None
    lora: Lora | None
    session: str | None
    read_cache: bool
    return_token_ids: bool
    script: array[int]

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n


def parse(raw: bytes) -> Body:
    try:
        body = msgspec.json.decode(raw)  # for long lists of ids a third quicker than orjson
    except msgspec.DecodeError as error:
        raise Refused(400, f"The body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, "The body must be a JSON object")
    return body


def generation(body: Body, prompts: Sequence[array[int]], model: Model, *, chat: bool, session: str | None) -> Ask:
    lora = served(body, model)
    _check_salt(body.get("cache_salt"))
    if body.get("priority"):
        raise Refused(400, "Got a priority but Priority scheduling is not enabled.", "priority")
    if body.get("echo"):
        raise Refused(400, "echo is not simulated", "echo")
    stop = body.get("stop") or ()
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise Refused(400, "stream_options must be an object", "stream_options")
    if options and not body.get("stream"):
        raise Refused(400, "Stream options can only be defined when `stream=True`.", "stream_options")
    ask = Ask(
        model=lora.name if lora else model.name,
        prompts=tuple(prompts),
        max_tokens=_max_tokens(body, chat=chat),
        n=_whole(body, "n") or 1,
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        ignore_eos=bool(body.get("ignore_eos")),
        min_tokens=_whole(body, "min_tokens", least=0) or 0,
        stop=(stop,) if isinstance(stop, str) else tuple(map(str, stop)),
        salt=body.get("cache_salt"),
        lora=lora,
        session=str(body["session_id"]) if body.get("session_id") else session,
        read_cache=body.get("prompt_logprobs") is None,
        return_token_ids=bool(body.get("return_token_ids")),
        script=pack(body.get(SCRIPT) or [], SCRIPT),
    )
    for prompt in prompts:
        _check_length(prompt, ask.max_tokens or 0, model.max_model_len)
    return ask


def served(body: Body, model: Model) -> Lora | None:
    """The adapter that the body names, None for the model itself."""
    name = body.get("model")
    if not name or name == model.name:
        return None
    lora = model.loras.get(name) if isinstance(name, str) else None
    if lora is None:
        raise Refused(404, f"The model `{name}` does not exist.", "model")
    return lora


def completion_prompts(body: Body, vocabulary: int) -> list[str | array[int]]:
    """The prompts of a completion: text, or token ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], int):
            return [_known(pack(prompt, "prompt"), vocabulary)]
        return [one if isinstance(one, str) else _known(pack(one, "prompt"), vocabulary) for one in prompt]
    raise Refused(400, "Either prompt or prompt_embeds must be provided and non-empty.", "prompt")


def pack(ids: object, param: str) -> array[int]:
    """Token ids as four bytes each."""
    if isinstance(ids, list):
        try:
            return array(TOKEN, ids)
        except (TypeError, OverflowError):  # something else than whole numbers from 0 to 2**32 - 1
            pass
    raise Refused(400, f"{param} must be text, token ids, or a list of either", param)


def _known(ids: array[int], vocabulary: int) -> array[int]:
    largest = int(np.frombuffer(ids, np.uint32).max()) if ids else 0
    if largest >= vocabulary:
        raise Refused(400, f"Token id {largest} is out of vocabulary", "prompt")
    return ids


def adds_specials(body: Body) -> bool:
    """Whether special tokens are put around the text of a completion."""
    return bool(body.get("add_special_tokens", True))


def _max_tokens(body: Body, *, chat: bool) -> int | None:
    asked = _whole(body, "max_completion_tokens") if chat else None
    asked = _whole(body, "max_tokens") if asked is None else asked
    return COMPLETION_TOKENS if asked is None and not chat else asked


def _whole(body: Body, name: str, least: int = 1) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int:
        raise Refused(400, f"{name} must be a whole number", name)
    if value < least:
        raise Refused(400, f"{name} must be at least {least}, got {value}.", name)
    return value


def _check_salt(salt: object) -> None:
    if salt is None:
        return
    if not isinstance(salt, str) or not salt:
        raise Refused(400, "Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(salt) > 128 or not SALT_FORBIDDEN.isdisjoint(salt):
        text = "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', or NUL."
        raise Refused(400, text, "cache_salt")


def _check_length(prompt: Sequence[int], output: int, limit: int) -> None:
    if output > limit:
        text = f"max_tokens={output} cannot be greater than max_model_len={limit}. Please request fewer output tokens."
        raise Refused(400, text, "max_tokens")
    if not prompt:
        raise Refused(400, "The decoder prompt cannot be empty", "prompt")
    if len(prompt) > limit - max(output, 1):
        text = (
            f"This model's maximum context length is {limit} tokens. However, you requested {output} output tokens and "
            f"your prompt contains {len(prompt)} input tokens, for a total of {len(prompt) + output} tokens. "
            "Please reduce the length of the input prompt or the number of requested output tokens."
        )
        raise Refused(400, text, "input_tokens")
