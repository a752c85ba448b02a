"""pytest tests/bench/test_sim.py: what `python -m bench sim` does, with a small prompt and a made-up engine."""

from __future__ import annotations

import pytest

from bench import sim


def test_a_profile_is_found_again_in_the_times_that_it_gives() -> None:
    rows = [([1.0, tokens, tokens * tokens / 2], 0.01 + 0.0005 * tokens) for tokens in (128.0, 512.0, 2048.0)]
    assert sim.fit(rows) == pytest.approx([0.01, 0.0005, 0.0], abs=1e-9)


def test_nothing_takes_less_than_no_time() -> None:
    rows = [([1.0, 100.0], 1.0), ([1.0, 200.0], 0.9), ([1.0, 300.0], 0.8)]
    constant, slope = sim.fit(rows)
    assert slope == 0
    assert 0.8 < constant < 1


@pytest.mark.parametrize("full", [True, False])
def test_each_part_of_an_answer_is_timed(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "TOKENS", 1000)
    parts = sim.answer_cpu_ms(16, "fast", full=full)
    assert len(parts) == sim.REPEAT
    assert all(part > 0 for one in parts for part in one)
