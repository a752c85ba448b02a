"""pytest tests/loadtest/sim/test_profile.py: how long steps take."""

from __future__ import annotations

import pytest

from loadtest.sim.profile import CPU, MODELS, given, presets, roofline
from loadtest.sim.request import Request
from loadtest.sim.scheduler import Chunk


def chunk(tokens: int, start: int = 0) -> Chunk:
    return Chunk(Request("r", [1], 1, 16), start, tokens, 0)


def test_given_numbers_are_what_a_step_takes() -> None:
    profile = given(8000, 0.010)
    assert profile.seconds([]) == 0
    assert profile.seconds([chunk(1, 500)]) == 0.010
    assert profile.seconds([chunk(1, 500)] * 40) == 0.010
    assert profile.seconds([chunk(4000)]) == 0.5
    assert profile.seconds([chunk(4000), chunk(4000)]) == pytest.approx(1.0)


def test_presets_are_estimates_but_for_the_engine_that_was_measured() -> None:
    found = presets()
    assert {profile.kind for name, profile in found.items() if name != CPU.name} == {"estimate"}
    assert CPU.kind == "measured"
    assert "h100:qwen3-32b" in found
    assert "l4:qwen3-32b" not in found  # 66 GB of weights
    assert found["a100:llama-3.1-8b"].at(100.0, None).kind == "given"


def test_a_roofline_says_what_the_data_sheets_do() -> None:
    """An 8B model on an H100: 16 GB of weights at 3.35 TB/s × 0.75, 16 GFLOP a token at 989 TFLOP/s × 0.55."""
    profile = roofline("h100", "llama-3.1-8b")
    assert profile.seconds([chunk(1)]) == pytest.approx(0.0064 + 0.001, rel=0.01)
    assert 1 / profile.token_s == pytest.approx(33_900, rel=0.01)
    assert profile.kv_tokens == pytest.approx(420_000, rel=0.05)  # 128 KiB a token
    longer = profile.seconds([chunk(8192, 100_000)])
    assert longer > 1.5 * profile.seconds([chunk(8192)])  # attention over what is there already


def test_decoding_many_long_sequences_reads_their_memory() -> None:
    profile = roofline("h100", "llama-3.1-8b")
    alone, many = profile.seconds([chunk(1, 8000)]), profile.seconds([chunk(1, 8000)] * 40)
    assert many == pytest.approx(alone + 39 * 8001 * MODELS["llama-3.1-8b"].kv_bytes / (3.35e12 * 0.75))


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        roofline("l4", "qwen3-14b")
