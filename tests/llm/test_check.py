"""pytest tests/llm/test_check.py: a difference from the engine is found and told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llm.check import check, compare, probes
from llm.model import Model, open_model
from llm.prompt import Media, Prompt, Unrendered
from tests.llm import toys
from tests.llm.cases import TEMPLATES


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return open_model(toys.write_folder(tmp_path, toys.byte_level(bos=True), chat_template_jinja=TEMPLATES["plain"]))


def answered(model: Model, body: dict[str, Any]) -> dict[str, Any]:
    """What an engine with the same folder answers."""
    made = model.render("/tokenize", body)
    assert not isinstance(made, Unrendered)
    ids = list(model.tokens(made[0]))
    return {"tokens": ids, "count": len(ids)}


def test_an_engine_that_agrees(model: Model) -> None:
    assert len(probes()) >= 7
    for body in probes():
        assert check(model.renderer, model.tokenizer, body, answered(model, body)) is None


def test_a_refusal_proves_nothing(model: Model) -> None:
    assert check(model.renderer, model.tokenizer, probes()[0], None) is None
    own = {"messages": [{"role": "user", "content": "x"}], "chat_template": "mine"}
    assert check(model.renderer, model.tokenizer, own, {"tokens": [1]}) == Unrendered("request_template")


def test_a_difference_is_told(model: Model) -> None:
    body = {"prompt": "the end"}
    answer = answered(model, body)
    dot = model.tokenizer.encode(".", False)[0]
    answer["tokens"][2] = dot
    difference = check(model.renderer, model.tokenizer, body, answer)
    assert not isinstance(difference, Unrendered)
    assert difference is not None
    assert difference.at == 2
    assert str(difference).startswith("token 2: ")
    assert difference.theirs == f"{dot} '.'"


def test_a_missing_end_is_told(model: Model) -> None:
    difference = compare(model.tokenizer, [1, 2], [1])
    assert difference is not None
    assert (difference.at, difference.theirs) == (1, "the end")
    assert compare(model.tokenizer, [1, 2], (1, 2)) is None


def test_what_a_prompt_is_matched_by(model: Model) -> None:
    assert model.by_bytes
    assert model.spelled(Prompt("ab", add_special_tokens=True)) == [b"<s>ab"]
    ids = model.tokenizer.encode("the end", True)
    assert model.spelled(Prompt(None, ids)) == [b"<s>the end"]
    assert model.tokens(Prompt(None, ids)) == ids
    picture = Media("image", "k", 2, 5)
    assert model.spelled(Prompt("ab<p>cd", add_special_tokens=True, media=(picture,))) == [b"<s>ab", picture, b"cd"]
