"""Prices: the file's faults are named, and amounts are exact."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.errors import UsageError
from server.pricing import Price, Prices

FILE = """\
currency = "EUR"

[default]
gpu_hour = 1.80

[models."qwen3-30b"]
input = 0.10
cached_input = 0.01
output = 0.40
gpus = 4
"""


def load(tmp_path: Path, text: str) -> Prices:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    return Prices.load(path)


def test_a_models_table_stands_over_the_default(tmp_path: Path) -> None:
    prices = load(tmp_path, FILE)
    assert prices.currency == "EUR"
    assert prices.of("other") == Price(gpu_hour=Decimal("1.80"))
    price = prices.of("qwen3-30b")
    assert price == Price(Decimal("0.10"), Decimal("0.01"), Decimal("0.40"), Decimal("1.80"), Decimal(4))


def test_amounts_are_exact(tmp_path: Path) -> None:
    price = load(tmp_path, FILE).of("qwen3-30b")
    assert price.cost(3, 0, 0) == Decimal("0.000000")  # 0.3 millionths
    assert price.cost(1_000_000, 2_000_000, 500_000) == Decimal("0.32")
    assert price.discount(1_000_000) == Decimal("0.09")
    assert price.time(500.0) == Decimal("1.000000")


def test_what_has_no_price_has_no_amount() -> None:
    price = Price(input=Decimal(1))
    assert price.cost(10, 0, 0) == Decimal("0.000010")
    assert price.cost(10, 1, 0) is None
    assert price.cost(10, 0, 1) is None
    assert price.discount(1) is None
    assert price.time(1.0) is None


@given(st.integers(0, 2**53), st.integers(0, 2**53), st.decimals(0, 1000, places=4), st.decimals(0, 1000, places=4))
def test_cost_and_discount_add_up_to_the_price_without_a_cache(
    uncached: int, cached: int, price: Decimal, part: Decimal
) -> None:
    of = Price(price, min(price, part), Decimal(0))
    cost, discount, whole = of.cost(uncached, cached, 0), of.discount(cached), of.cost(uncached + cached, 0, 0)
    assert cost is not None
    assert discount is not None
    assert whole is not None
    assert abs(cost + discount - whole) <= Decimal("0.000002")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "currency"),
        ('currency = ""', "currency"),
        ("currency = 5", "currency"),
        ('currency = = "EUR"', "line 1"),
        ('currency = "EUR"\nprice = 1', "'price'"),
        ('currency = "EUR"\ndefault = 1', "[default] is not a table"),
        ('currency = "EUR"\n[default]\ninputs = 1', "[default]: there is no 'inputs'"),
        ('currency = "EUR"\n[default]\ninput = "1"', "[default] input"),
        ('currency = "EUR"\n[default]\ninput = true', "[default] input"),
        ('currency = "EUR"\n[default]\ninput = -0.1', "[default] input"),
        ('currency = "EUR"\n[default]\ninput = nan', "[default] input"),
        ('currency = "EUR"\n[default]\ninput = inf', "[default] input"),
        ('currency = "EUR"\n[default]\ngpus = 0', "[default] gpus"),
        ('currency = "EUR"\n[default]\ngpus = 1.5', "[default] gpus"),
        ('currency = "EUR"\nmodels = 1', "[models]"),
        ('currency = "EUR"\n[models]\nm = 1', '[models."m"] is not a table'),
        ('currency = "EUR"\n[models."a.b"]\noutput = []', '[models."a.b"] output'),
    ],
)
def test_a_fault_names_file_table_and_field(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith(f"prices {tmp_path / 'prices.toml'}: ")
    assert says in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        Prices.load(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'currency = "\xe9"')
    with pytest.raises(UsageError, match=r"latin\.toml"):
        Prices.load(tmp_path / "latin.toml")


def test_the_documents_example_is_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "usage.md").read_text(encoding="utf-8")
    example = page.split("```toml\n")[1].split("```")[0]
    prices = load(tmp_path, example)
    assert prices.currency is not None
    for field in Price._fields:
        assert f"| `{field}` |" in page
