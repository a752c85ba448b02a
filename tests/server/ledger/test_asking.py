"""Whatever a client sends, asking what is known of it raises nothing, and holds nobody up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llm.model import open_model
from server.ledger.asking import LARGE, MANY, Asking
from server.ledger.faults import Faults
from server.ledger.shelf import Served, Shelf, Speller
from server.ledger.tokeniser import Tokeniser
from server.routes import ROUTES
from server.routing.asked import Asked
from tests.llm.cases import TEMPLATES
from tests.llm.toys import unigram, write_folder
from tests.server.ledger.simulated import word_tokenizer

PATHS = sorted(route.path for route in ROUTES.values())
DEEP = 900  # about as deep as JSON may be nested here


def made(folder: Path) -> Iterator[Asking]:
    faults = Faults()
    tokeniser = Tokeniser(faults)
    shelf = Shelf({}, lambda: None)
    shelf._served["toy"] = Served(Speller(open_model(folder), "toy"), None)
    asking = Asking(shelf, tokeniser, faults)
    yield asking
    tokeniser.stop()
    assert faults.count == 0, "a known outcome, not a fault"


@pytest.fixture(scope="module", params=["plain", "tools", "parts"])
def asking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    """A model that is matched by bytes."""
    folder = tmp_path_factory.mktemp("model") / "toy"
    yield from made(write_folder(folder, word_tokenizer(), chat_template_jinja=TEMPLATES[request.param]))


@pytest.fixture(scope="module")
def by_tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    folder = tmp_path_factory.mktemp("model") / "toy"
    yield from made(write_folder(folder, unigram(), chat_template_jinja=TEMPLATES["plain"]))


def nested(depth: int, kind: type) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


texts = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", "user", "assistant", "system", "text", "tool_use", "\x00", "é" * 50, "[" * 2000, '"\\ud800"']),
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), texts)
names = st.sampled_from(
    (
        "role",
        "content",
        "type",
        "text",
        "name",
        "arguments",
        "function",
        "id",
        "input",
        "parameters",
        "image_url",
        "source",
    )
)
values = st.recursive(
    scalars | st.sampled_from([nested(DEEP, dict), nested(DEEP, list)]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names | st.text(max_size=3), inner, max_size=5),
    max_leaves=12,
)
parts = st.lists(
    st.fixed_dictionaries({}, optional=dict.fromkeys(("type", "text", "input", "content"), values)), max_size=3
)
calls = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function"), "function": st.fixed_dictionaries({"name": texts, "arguments": values})}
    ),
    max_size=2,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer"]) | values},
        optional={"content": texts | parts | values, "tool_calls": calls | values, "name": values, "reasoning": values},
    )
    | values,
    max_size=4,
)
bodies = st.fixed_dictionaries(
    {},
    optional={
        "messages": messages | values,
        "input": messages | values,
        "prompt": texts | st.lists(st.integers(-1, 2**64 - 1), max_size=5) | values,
        "system": values,
        "instructions": values,
        "tools": calls | values,
        "documents": values,
        "max_tokens": values,
        "chat_template_kwargs": values,
        "add_generation_prompt": values,
        "continue_final_message": values,
        "truncate_prompt_tokens": values,
        "cache_salt": values,
        "reasoning_effort": values,
        "thinking": values,
        "response_format": values,
    },
)
ARGUMENTS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "f", "arguments": "[" * 2000}}],
}


@settings(max_examples=50)
@given(path=st.sampled_from(PATHS), body=bodies, salt=st.none() | st.text(min_size=1, max_size=4))
@example(path="/v1/chat/completions", body={"messages": [ARGUMENTS]}, salt=None)
@example(path="/v1/messages", body={"messages": [{"role": "user", "content": 5}], "max_tokens": 2**64 - 1}, salt=None)
@example(path="/v1/completions", body={"prompt": [2**40, 7]}, salt="x")
@example(path="/v1/completions", body={"prompt": [2**64 - 1]}, salt="x")
def test_no_body_makes_it_raise(asking: Asking, path: str, body: dict[str, Any], salt: str | None) -> None:
    asked = asking.ask(path, "toy", body, salt)
    assert asked.prompt is None or isinstance(asked.prompt, bytes)
    assert asked.output >= 0


@pytest.mark.parametrize("ids", [[1, 2, 2**32 - 1], [5, 2**32], [2**64 - 1]])
async def test_ids_that_no_model_has_are_no_fault(by_tokens: Asking, ids: list[int]) -> None:
    asked = by_tokens.ask("/v1/completions", "toy", {"prompt": ids}, None)
    assert asked.unspelled == (max(ids) < 2**32)
    if asked.unspelled:
        await by_tokens.spell(asked)
    assert (asked.prompt is None) == (max(ids) >= 2**32)
    assert not asked.unspelled


def same(one: Asked, other: Asked) -> bool:
    return (one.prompt, one.tokens, one.rendered, one.namespace) == (
        other.prompt,
        other.tokens,
        other.rendered,
        other.namespace,
    )


@pytest.mark.parametrize("form", ["messages", "parts", "tools"])
async def test_what_has_many_pieces_is_made_in_a_thread_and_alike(asking: Asking, form: str) -> None:
    def body(count: int) -> dict[str, Any]:
        chat: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
        if form == "messages":
            return {"messages": chat * count}
        if form == "parts":
            return {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}] * count}]}
        return {"messages": chat, "tools": [{"type": "function", "function": {"name": "f"}}] * count}

    few, many = (asking.ask("/v1/chat/completions", "toy", body(count), None) for count in (MANY // 2, MANY))
    assert (few.unspelled, many.unspelled) == (False, True)
    assert few.prompt is not None
    assert many.prompt is None
    await asking.spell(many)
    assert many.prompt is not None
    late = asking.ask("/v1/chat/completions", "toy", body(MANY // 2), None, LARGE)
    assert late.unspelled
    await asking.spell(late)
    assert same(few, late)


async def test_a_body_that_cannot_be_rendered_in_a_thread_goes_by_load(asking: Asking) -> None:
    asked = asking.ask("/v1/chat/completions", "toy", {"messages": [ARGUMENTS] * MANY}, None)
    await asking.spell(asked)
    assert (asked.prompt, asked.rendered, asked.unspelled) == (None, None, False)
