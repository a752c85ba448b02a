"""Prices that an operator configures: of a GPU's hour, or of tokens. Exact decimals; nothing is assumed where none is given."""

from __future__ import annotations

import tomllib
from decimal import ROUND_HALF_EVEN, Context, Decimal
from pathlib import Path
from typing import Any, NamedTuple

from kvgate.errors import UsageError

_MICRO = Decimal("0.000001")
_MILLION = Decimal(1_000_000)
_HIGHEST = Decimal(1_000_000_000)
_TOP = ("currency", "default", "models")
_MONEY = Context(prec=50, rounding=ROUND_HALF_EVEN)


class Price(NamedTuple):
    """What holds for one model; None where nothing is configured.

    input, cached_input, output: for a million tokens; `input` is for prompt tokens that were not cached. gpu_hour: one GPU for
    an hour, of which a replica has `gpus`.
    """

    input: Decimal | None = None
    cached_input: Decimal | None = None
    output: Decimal | None = None
    gpu_hour: Decimal | None = None
    gpus: Decimal = Decimal(1)

    def cost(self, uncached: int, cached: int, output: int) -> Decimal | None:
        """Of tokens. None where a price is missing of which there are any."""
        return _total((uncached, self.input), (cached, self.cached_input), (output, self.output))

    def discount(self, cached: int) -> Decimal | None:
        """By how much cached tokens are cheaper than computed ones. None where one of the two prices is missing."""
        if self.input is None or self.cached_input is None:
            return None
        return _total((cached, self.input - self.cached_input))

    def time(self, seconds: float) -> Decimal | None:
        """Of a replica for so many seconds. None without a price of GPUs."""
        if self.gpu_hour is None:
            return None
        return _round(Decimal(seconds) * self.gpu_hour * self.gpus / 3600)


class Prices:
    """The price of each model, and the currency of all. `Prices.none()` where none are configured."""

    def __init__(self, currency: str | None, default: Price, models: dict[str, Price]) -> None:
        self.currency = currency
        self._default = default
        self._models = models

    @classmethod
    def none(cls) -> Prices:
        return cls(None, Price(), {})

    @classmethod
    def load(cls, path: str | Path) -> Prices:
        """From a TOML file (docs/usage.md). Raises UsageError that names the file, the table and the field at fault."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"prices {path}: {getattr(error, 'strerror', None) or error}") from error
        try:
            page = tomllib.loads(text, parse_float=Decimal)
        except (tomllib.TOMLDecodeError, ArithmeticError) as error:
            raise UsageError(f"prices {path}: {error}") from error
        return cls._read(page, str(path))

    @classmethod
    def _read(cls, page: dict[str, Any], path: str) -> Prices:
        if unknown := page.keys() - set(_TOP):
            raise UsageError(f"prices {path}: there is no {min(unknown)!r} here: it may hold {', '.join(_TOP)}")
        currency = page.get("currency")
        if not isinstance(currency, str) or not (0 < len(currency) <= 16 and currency.isprintable()):
            raise UsageError(f'prices {path}: currency: name it, e.g. currency = "EUR"')
        default = _price(page.get("default", {}), Price(), f"prices {path}: [default]")
        models = page.get("models", {})
        if not isinstance(models, dict):
            raise UsageError(f'prices {path}: [models] is not a table of tables such as [models."name"]')
        each = {name: _price(fields, default, f'prices {path}: [models."{name}"]') for name, fields in models.items()}
        return cls(currency, default, each)

    def of(self, model: str) -> Price:
        return self._models.get(model, self._default)


def _price(fields: Any, default: Price, where: str) -> Price:
    """A table's fields over those of `default`."""
    if not isinstance(fields, dict):
        raise UsageError(f"{where} is not a table")
    for name, value in fields.items():
        if name not in Price._fields:
            raise UsageError(f"{where}: there is no {name!r}: it may hold {', '.join(Price._fields)}")
        if type(value) not in (int, Decimal) or not (Decimal(value).is_finite() and 0 <= value <= _HIGHEST):
            raise UsageError(f"{where} {name}: give a number from 0 to {_HIGHEST:,}")
        if name == "gpus" and (value < 1 or value != int(value)):
            raise UsageError(f"{where} gpus: give a whole number from 1")
    return default._replace(**{name: Decimal(value) for name, value in fields.items()})


def _total(*parts: tuple[int, Decimal | None]) -> Decimal | None:
    total = Decimal(0)
    for tokens, price in parts:
        if tokens:
            if price is None:
                return None
            total += tokens * price
    return _round(total / _MILLION)


def _round(amount: Decimal) -> Decimal:
    return amount.quantize(_MICRO, context=_MONEY)
