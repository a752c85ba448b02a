"""The usage report: sums, who sees what, and that unknown stays unknown."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.pricing import Price, Prices
from server.usage_report import FIELDS, Counts, counts, usage_report

PRICES = Prices(
    "EUR", Price(Decimal("0.2"), Decimal("0.02"), Decimal("0.8"), Decimal("3.6")), {"free": Price(Decimal(0))}
)
USAGE = {
    ("acme", "qwen3"): Counts(requests=10, known=9_000_000, unknown=1_000_000, cached=6_000_000, output=500_000, saved=600.0),
    ("acme", "small"): Counts(requests=1, known=100, output=5),
    ("beta", "qwen3"): Counts(requests=2, known=1000, cached=900, output=10, saved=0.0, unrated=900),
}  # fmt: skip


class Series:
    """The part of server.metrics.Series that is read."""

    def __init__(self, route: str, model: str, tenant: str, numbers: tuple[int, int, int, int, float, int]) -> None:
        self.labels = (route, model, tenant)
        self.codes = {200: 2, 499: 1}
        self.known, self.unknown, self.cached, self.output, self.saved_seconds, self.unrated = numbers


def test_routes_are_summed() -> None:
    every = [
        Series("/v1/chat/completions", "qwen3", "acme", (10, 1, 8, 3, 0.5, 2)),
        Series("/v1/messages", "qwen3", "acme", (20, 2, 16, 6, 1.0, 4)),
        Series("/v1/messages", "other", "acme", (0, 0, 0, 0, 0.0, 0)),
    ]
    assert counts(every) == {("acme", "qwen3"): Counts(6, 30, 3, 24, 9, 1.5, 6), ("acme", "other"): Counts(3)}


def test_an_operator_sees_all_tenants_in_order() -> None:
    report = usage_report(USAGE, PRICES, since=0.5)
    assert report["since"] == "1970-01-01T00:00:00Z"
    assert report["currency"] == "EUR"
    assert [tenant["tenant"] for tenant in report["tenants"]] == ["acme", "beta"]
    acme = report["tenants"][0]
    assert [model["model"] for model in acme["models"]] == ["qwen3", "small"]
    assert acme["models"][0] == {
        "model": "qwen3",
        "requests": 10,
        "prompt_tokens_known": 9_000_000,
        "prompt_tokens_unknown": 1_000_000,
        "cached_tokens": 6_000_000,
        "written_tokens": 3_000_000,
        "output_tokens": 500_000,
        "hit_ratio": 0.666667,
        "saved_prefill_seconds": 600.0,
        "unrated_cached_tokens": 0,
        "token_cost": "1.320000",  # 4 M at 0.2, 6 M at 0.02, 0.5 M at 0.8
        "token_saved": "1.080000",
        "gpu_saved": "0.600000",
    }
    assert acme["requests"] == 11
    assert acme["token_cost"] == "1.320024"


def test_a_tenant_sees_itself_alone_also_before_its_first_request() -> None:
    (beta,) = usage_report(USAGE, PRICES, 0, tenant="beta")["tenants"]
    assert beta["tenant"] == "beta"
    (new,) = usage_report(USAGE, PRICES, 0, tenant="new")["tenants"]
    assert (new["requests"], new["hit_ratio"], new["token_cost"], new["models"]) == (0, None, None, [])


def test_seconds_without_any_rate_are_unknown_and_so_is_their_money() -> None:
    (beta,) = usage_report(USAGE, PRICES, 0, tenant="beta")["tenants"]
    assert beta["saved_prefill_seconds"] is None
    assert beta["gpu_saved"] is None
    assert beta["unrated_cached_tokens"] == 900
    assert beta["token_saved"] == "0.000162"


def test_seconds_with_a_rate_for_some_are_told_with_what_is_left_out() -> None:
    usage = {("a", "m"): Counts(known=100, cached=80, saved=0.5, unrated=30)}
    (row,) = usage_report(usage, PRICES, 0)["tenants"]
    assert (row["saved_prefill_seconds"], row["unrated_cached_tokens"]) == (0.5, 30)


def test_without_prices_there_is_no_money() -> None:
    report = usage_report(USAGE, Prices.none(), 0)
    assert report["currency"] is None
    for tenant in report["tenants"]:
        assert {tenant[name] for name in ("token_cost", "token_saved", "gpu_saved")} == {None}


def test_a_sum_with_an_unknown_part_is_unknown() -> None:
    usage = {("a", "qwen3"): Counts(known=10), ("a", "free"): Counts(known=10, cached=5)}
    (row,) = usage_report(usage, PRICES, 0)["tenants"]
    assert row["token_cost"] is None
    assert [model["token_cost"] for model in row["models"]] == [None, "0.000002"]


def test_every_number_has_a_unit_and_a_kind_in_the_report_and_a_row_in_the_document() -> None:
    report = usage_report(USAGE, PRICES, 0)
    page = (Path(__file__).parents[2] / "docs" / "usage.md").read_text(encoding="utf-8")
    for tenant in report["tenants"]:
        for row in (tenant, *tenant["models"]):
            assert row.keys() - {"tenant", "model", "models"} == report["fields"].keys() == FIELDS.keys()
    assert report["fields"]["gpu_saved"]["unit"] == "EUR"
    for name, (unit, kind, _) in FIELDS.items():
        assert f"| `{name}` | {unit.format(currency='currency')} | {kind} |" in page


NUMBERS = st.integers(0, 2**40)


@given(
    st.dictionaries(
        st.tuples(st.sampled_from("ab"), st.sampled_from("mn")),
        st.builds(Counts, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.floats(0, 1e9), NUMBERS),
    ),
    st.sampled_from([None, "a", "b", "c"]),
)
def test_whatever_was_counted_it_is_json_and_adds_up(usage: dict[tuple[str, str], Counts], tenant: str | None) -> None:
    report = usage_report(usage, PRICES, 1.8e9, tenant)
    assert json.loads(orjson.dumps(report)) == report
    for row in report["tenants"]:
        assert tenant in (None, row["tenant"])
        for name in ("requests", "prompt_tokens_known", "cached_tokens", "written_tokens", "output_tokens"):
            if name != "written_tokens":
                assert row[name] == sum(model[name] for model in row["models"])
            assert row[name] >= 0
        if None not in (costs := [model["token_cost"] for model in row["models"]]) and costs:
            assert Decimal(row["token_cost"]) == sum(map(Decimal, costs))


@pytest.mark.parametrize("known", [0, 5])
def test_more_cached_than_prompt_writes_nothing(known: int) -> None:
    (row,) = usage_report({("a", "m"): Counts(known=known, cached=9)}, PRICES, 0)["tenants"]
    assert row["written_tokens"] == 0
