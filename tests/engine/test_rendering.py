"""The prompts made here are the engine's: ids from /tokenize where it has the route, else from the answer itself.

Templates other than the model's own go with the request, which this engine trusts; here they stand for the engine's
--chat-template. Of Anthropic's route the engine tells only how many tokens a prompt has, and its KV events which.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from llm.check import check, compare, probes
from llm.model import Model, open_model
from llm.prompt import Prompt, Unrendered
from llm.renderer import EngineOptions
from server.engines.launch import RunningEngine
from server.engines.local import embedded_model, engine_python
from tests.llm.cases import (
    ANTHROPIC,
    CHAT,
    CHATS,
    COMPLETIONS,
    MESSAGES,
    RESPONSE,
    RESPONSES,
    TEMPLATES,
    TEXTS,
    message,
    text,
    user,
)
from tests.llm.test_renderer import recorded, vllm_says

READER = Path(__file__).with_name("token_reader.py")


@pytest.fixture(scope="module")
def model() -> Model:
    return open_model(embedded_model(os.environ))


@pytest.fixture(scope="module")
def others() -> dict[str, Model]:
    """The same model behind other chat templates."""
    folder = embedded_model(os.environ)
    return {name: open_model(folder, EngineOptions(chat_template=source)) for name, source in TEMPLATES.items()}


def post(engine: RunningEngine, route: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """The engine's answer, None where it refuses the request. It answers some of its clients' faults with 500."""
    request = urllib.request.Request(
        engine.url + route, json.dumps({"model": engine.model, **body}).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            made: dict[str, Any] = json.load(answer)
            return made
    except urllib.error.HTTPError as error:
        if error.code not in (400, 422, 500):
            raise
        return None


def ours(model: Model, route: str, body: dict[str, Any]) -> list[int] | Unrendered:
    made = model.render(route, body)
    return made if isinstance(made, Unrendered) else list(model.tokens(made[0]))


def assert_same(model: Model, made: list[int], theirs: list[int], asked: object) -> None:
    difference = compare(model.tokenizer, made, theirs)
    assert difference is None, f"{difference}: {json.dumps(asked)[:500]}"


def agrees(model: Model, route: str, body: dict[str, Any], theirs: list[int] | None) -> bool:
    """Whether the engine made a prompt, and the same one is made here; fails where another is."""
    made = ours(model, route, body)
    if theirs is None:
        return False
    assert not isinstance(made, Unrendered), (made, body)
    assert_same(model, made, theirs, body)
    return True


def test_its_tokenizer_is_matched_by_bytes(model: Model) -> None:
    assert model.tokenizer.why_not == ""
    for sample in TEXTS:
        ids = model.tokenizer.encode(sample, True)
        assert b"".join(model.tokenizer.token_bytes(ids)) == model.tokenizer.spell(sample, True) == sample.encode()
    assert model.tokenizer.spell("a\x13b", True) == b"ab", "it has no token for this control character"


def test_the_check_at_the_start_passes(engine: RunningEngine, model: Model) -> None:
    for body in probes():
        answer = post(engine, "/tokenize", body)
        assert answer is not None
        assert check(model.renderer, model.tokenizer, body, answer) is None


# what /tokenize does not take; these go through the route itself, which is slower
UNTOKENIZED = ("documents", "reasoning_effort", "cache_salt", "tool_choice")


def compare_chats(engine: RunningEngine, model: Model, more: dict[str, Any]) -> int:
    """How many chats both make a prompt of, each the same one."""
    agreed = 0
    for _, body in CHATS:
        if any(key in body for key in UNTOKENIZED):
            answer = post(engine, CHAT, body | more | {"max_tokens": 1, "return_token_ids": True})
            agreed += agrees(model, CHAT, body, None if answer is None else answer["prompt_token_ids"])
        else:
            answer = post(engine, "/tokenize", body | more)
            agreed += agrees(model, "/tokenize", body, None if answer is None else answer["tokens"])
    return agreed


def test_chats(engine: RunningEngine, model: Model) -> None:
    assert compare_chats(engine, model, {}) >= 60


def test_the_route_makes_what_tokenize_makes(engine: RunningEngine, model: Model) -> None:
    for _, body in CHATS[::4]:
        answer = post(engine, CHAT, body | {"max_tokens": 1, "return_token_ids": True})
        agrees(model, CHAT, body, None if answer is None else answer["prompt_token_ids"])


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_through_other_templates(name: str, engine: RunningEngine, others: dict[str, Model]) -> None:
    assert compare_chats(engine, others[name], {"chat_template": TEMPLATES[name]}) >= 60


def test_completions(engine: RunningEngine, model: Model) -> None:
    bodies: list[dict[str, Any]] = [{"prompt": each} for each in TEXTS if each]
    bodies += [{"prompt": TEXTS[0], "add_special_tokens": False}, {"prompt": [1, 2, 3, 500]}, {"prompt": ["a", "b"]}]
    bodies += [{"prompt": [[5, 6], [7]]}, {"prompt": "x", "truncate_prompt_tokens": 50}, {"prompt": "x", "echo": True}]
    for body in bodies:
        answer = post(engine, COMPLETIONS, body | {"max_tokens": 1, "return_token_ids": True})
        assert answer is not None
        made = model.render(COMPLETIONS, body)
        assert not isinstance(made, Unrendered)
        theirs = [choice["prompt_token_ids"] for choice in answer["choices"]]
        assert len(theirs) == len(made)
        for prompt, ids in zip(made, theirs, strict=True):
            assert_same(model, list(model.tokens(prompt)), ids, body)


def test_messages_have_as_many_tokens(engine: RunningEngine, model: Model) -> None:
    agreed = 0
    for _, body in ANTHROPIC:
        counted = {key: value for key, value in body.items() if key not in ("max_tokens", "cache_salt")}
        answer = post(engine, "/v1/messages/count_tokens", counted)
        made = ours(model, MESSAGES, body)
        if answer is None:
            continue
        assert not isinstance(made, Unrendered), (made, body)
        assert len(made) == answer["input_tokens"], body
        agreed += 1
    assert agreed >= 25


def test_messages_are_stored_under_these_tokens(engine: RunningEngine, model: Model) -> None:
    assert engine.events is not None
    fresh = f"{uuid4()} " + " ".join(f"word {number}" for number in range(40))
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"city": "Köln"}}
    bodies = [
        message(user("x"), system=[text(f"{fresh} a"), text("b", cache_control={"type": "ephemeral"})]),
        message(user([text(f"{fresh} c"), text("d")]), {"role": "assistant", "content": "e"}, user("f")),
        message(user(f"{fresh} g"), {"role": "assistant", "content": [text("h"), use]}, user("i")),
    ]
    prompts = [ours(model, MESSAGES, body) for _, body in bodies]
    for _, body in bodies:
        assert post(engine, MESSAGES, body | {"max_tokens": 1}) is not None
    argv = [engine_python(os.environ), str(READER), engine.events.replay]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    stored = {tuple(ids) for ids in json.loads(done.stdout)}
    for prompt in prompts:
        assert not isinstance(prompt, Unrendered)
        blocks = [tuple(prompt[at : at + 32]) for at in range(0, len(prompt) // 32 * 32, 32)]
        assert len(blocks) >= 3
        assert stored.issuperset(blocks)


def test_responses_have_as_many_tokens(engine: RunningEngine, model: Model) -> None:
    agreed = 0
    for _, body in RESPONSE:
        answer = post(engine, RESPONSES, body | {"max_output_tokens": 1, "store": False})
        made = ours(model, RESPONSES, body)
        if answer is None or isinstance(made, Unrendered):
            continue
        assert len(made) == answer["usage"]["input_tokens"], body
        agreed += 1
    assert agreed >= 12


def test_the_record_is_what_this_vllm_says() -> None:
    said, record = vllm_says(), recorded()
    for name in TEMPLATES:
        assert said[name] == record[name], name


def test_a_prompts_bytes_are_those_of_its_tokens(model: Model) -> None:
    for route, body in [*CHATS, *ANTHROPIC, *RESPONSE]:
        made = model.render(route, body)
        for prompt in () if isinstance(made, Unrendered) else made:
            joined = b"".join(model.tokenizer.token_bytes(model.tokens(prompt)))
            assert model.spelled(prompt) == [joined]
            assert model.spelled(Prompt(None, model.tokens(prompt))) == [joined]
