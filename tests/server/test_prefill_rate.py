"""The prefill rate, from pages as vLLM writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.prefill_rate import PrefillRate


def page(tokens: float, requests: int, seconds: float, engine: int = 0) -> bytes:
    """The lines of vLLM 0.32, with neighbours that must not be taken for them."""
    labels = f'{{engine="{engine}",model_name="qwen3"}}'
    return f"""\
# HELP vllm:request_prefill_time_seconds Histogram of time spent in PREFILL phase for request.
# TYPE vllm:request_prefill_time_seconds histogram
vllm:request_prefill_time_seconds_bucket{{engine="{engine}",le="0.3",model_name="qwen3"}} 7.0
vllm:request_prefill_time_seconds_count{labels} {requests}.0
vllm:request_prefill_time_seconds_sum{labels} {seconds}
vllm:request_prefill_time_seconds_created{labels} 1.8e+09
vllm:request_prefill_kv_computed_tokens_bucket{{engine="{engine}",le="1.0",model_name="qwen3"}} 7.0
vllm:request_prefill_kv_computed_tokens_count{labels} {requests}.0
vllm:request_prefill_kv_computed_tokens_sum{labels} {tokens}
vllm:request_decode_time_seconds_sum{labels} 99.0
""".encode()


def rate_of(*pages: bytes, **given: float) -> PrefillRate:
    rate = PrefillRate(**given)
    for each in pages:
        rate.observe(each)
    return rate


def test_one_page_tells_no_rate_since_it_may_be_of_long_ago() -> None:
    assert rate_of(page(1e6, 100, 10.0)).tokens_per_second is None


def test_the_rate_is_tokens_by_seconds_between_two_pages() -> None:
    assert rate_of(page(1000, 1, 5.0), page(3000, 3, 5.5)).tokens_per_second == 4000


def test_it_is_unknown_until_enough_was_seen() -> None:
    rate = rate_of(page(0, 0, 0), page(255, 1, 0.1))
    assert rate.tokens_per_second is None
    rate.observe(page(510, 2, 0.2))
    assert rate.tokens_per_second == pytest.approx(2550, rel=1e-3)


def test_the_first_and_the_last_line_count_too() -> None:
    def bare(n: int) -> bytes:
        name = "vllm:request_prefill_kv_computed_tokens"
        return f"{name}_sum {1000 * n}\n{name}_count {n}\nvllm:request_prefill_time_seconds_sum {n}".encode()

    assert rate_of(bare(0), bare(1)).tokens_per_second == 1000


def test_numbers_in_scientific_notation() -> None:
    assert rate_of(page(0, 0, 0), page(1.5e06, 2, 1e1)).tokens_per_second == 150_000


def test_an_engine_that_started_anew_is_measured_anew() -> None:
    rate = rate_of(page(0, 0, 0), page(10_000, 4, 1.0), page(100, 1, 0.5))
    assert rate.tokens_per_second is None
    rate.observe(page(2100, 2, 1.5))
    assert rate.tokens_per_second == 2000


def test_several_engines_behind_one_port_are_taken_together() -> None:
    rate = rate_of(page(0, 0, 0) + page(0, 0, 0, 1), page(1000, 1, 1) + page(3000, 1, 1, 1))
    assert rate.tokens_per_second == 2000


@pytest.mark.parametrize(
    "gap", [b"", b"<html>", page(1, 1, 1).replace(b"_sum", b"_total"), page(1, 1, 1).replace(b" 1\n", b" e\n")]
)
def test_a_page_that_lacks_the_numbers_changes_nothing(gap: bytes) -> None:
    assert rate_of(page(0, 0, 0), gap, page(1000, 1, 1)).tokens_per_second == 1000


def test_prompts_that_were_cached_but_for_a_few_tokens_tell_nothing_of_the_rate() -> None:
    cold = page(10_000, 10, 1.0)
    warm = page(10_000 + 1000, 10 + 100, 1.0 + 100 * 0.02)  # 10 tokens each, 20 ms of fixed cost
    assert rate_of(page(0, 0, 0), cold, warm).tokens_per_second == 10_000


def test_an_idle_engine_keeps_its_rate() -> None:
    same = page(10_000, 10, 1.0)
    assert rate_of(page(0, 0, 0), *[same] * 1000).tokens_per_second == 10_000


def test_a_change_shows_after_a_few_half_lives() -> None:
    rate = rate_of(page(0, 0, 0), page(10_000, 10, 1.0), half_life=1000)
    for n in range(1, 11):
        rate.observe(page(10_000 + 1000 * n, 10 + n, 1.0 + 1.0 * n))
    assert rate.tokens_per_second == pytest.approx(1000, rel=0.05)


@given(st.lists(st.tuples(st.integers(64, 100_000), st.floats(0.001, 100.0)), min_size=1, max_size=20))
def test_it_lies_between_the_slowest_and_the_fastest(steps: list[tuple[int, float]]) -> None:
    rate = PrefillRate(min_tokens=1)
    tokens, seconds = 0, 0.0
    rate.observe(page(0, 0, 0))
    for n, (more, time) in enumerate(steps, 1):
        tokens, seconds = tokens + more, seconds + time
        rate.observe(page(tokens, n, seconds))
    rates = [more / time for more, time in steps]
    measured = rate.tokens_per_second
    assert measured is not None
    assert min(rates) * 0.999 <= measured <= max(rates) * 1.001


@given(st.binary())
def test_no_page_breaks_it(data: bytes) -> None:
    assert rate_of(data, b"vllm:request_prefill_time_seconds_sum " + data).tokens_per_second is None
