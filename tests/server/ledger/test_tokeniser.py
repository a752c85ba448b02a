"""pytest tests/server/ledger/test_tokeniser.py: what is not tokenised, since it would take the gateway's memory."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from llm.model import Model, open_model
from llm.prompt import Prompt
from server.ledger import tokeniser as module
from server.ledger.faults import Faults
from server.ledger.tokeniser import LARGEST_BYTES, Tokeniser
from tests.llm import toys


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return open_model(toys.write_folder(tmp_path))


@pytest.mark.parametrize(
    "prompt",
    [
        Prompt("a" * (LARGEST_BYTES + 1)),
        Prompt("\u00fc" * (LARGEST_BYTES // 2 + 1)),
        Prompt(None, [1] * (LARGEST_BYTES // 4 + 1)),
    ],
    ids=["text", "text that is not ASCII", "ids"],
)
async def test_a_prompt_that_is_too_large_is_left_out(prompt: Prompt, model: Model) -> None:
    tokeniser = Tokeniser(Faults())
    try:
        assert await tokeniser.blocks(model, prompt, 16) is None
        assert await tokeniser.packed(model, prompt) is None
        assert tokeniser.left_out == 2
        small = Prompt("\u00fc a")
        assert await tokeniser.blocks(model, small, 1) == (3, ["\u00fc".encode(), b" ", b"a"])
        assert tokeniser.left_out == 2
    finally:
        tokeniser.stop()


async def test_nobody_waits_long_for_what_others_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.01)
    tokeniser, done, begun = Tokeniser(Faults()), threading.Event(), []
    try:
        assert await tokeniser.soon(done.wait) is None  # whoever sent it goes on, too
        assert await tokeniser.soon(lambda: begun.append(1)) is None
        assert tokeniser.left_out == 2
        done.set()
        monkeypatch.setattr(module, "PATIENCE_SECONDS", 60.0)
        assert await tokeniser.soon(lambda: 7) == 7
        assert begun == []
    finally:
        done.set()
        tokeniser.stop()
