from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.exposition import Sample, samples, total
from loadtest.percentiles import median, percentile, summary
from loadtest.truth import reusable


def test_p99_of_few_samples_is_called_the_maximum() -> None:
    few, enough = summary([float(i) for i in range(99)]), summary([float(i) for i in range(1, 101)])
    assert (few["p99"], few["p99_is"], few["n"]) == (98.0, "maximum", 99)
    assert (enough["p99"], enough["p99_is"], enough["max"]) == (99.0, "percentile", 100.0)


def test_no_samples_are_unknown_and_not_zero() -> None:
    assert summary([]) == {
        "n": 0,
        "mean": None,
        "p50": None,
        "p90": None,
        "p99": None,
        "p99_is": "unknown",
        "max": None,
    }
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_a_percentile_is_a_sample_and_the_median_halves(values: list[float]) -> None:
    assert percentile(values, 90) in values
    assert sum(v <= median(values) for v in values) * 2 >= len(values)


@pytest.mark.parametrize(
    ("shared", "prompt", "block", "tokens"),
    [
        (3008, 3024, 32, 3008),
        (3019, 3019, 128, 2944),
        (64, 64, 32, 32),
        (64, 65, 32, 64),
        (31, 99, 32, 0),
        (0, 5, 16, 0),
    ],
)
def test_what_can_be_reused(shared: int, prompt: int, block: int, tokens: int) -> None:
    """Whole blocks, and never the last token."""
    assert reusable(shared, prompt, block) == tokens


def test_exposition() -> None:
    page = '# HELP x\nvllm:a_total{engine="0",m="q\\"}x"} 3.0\nvllm:a_total{engine="1"} 4e1 170000\nvllm:b 1\nbroken\n'
    found = list(samples(page))
    assert found[0] == Sample("vllm:a_total", {"engine": "0", "m": 'q"}x'}, 3.0)
    assert total(found, "vllm:a_total") == 43.0
    assert total(found, "vllm:missing") is None
