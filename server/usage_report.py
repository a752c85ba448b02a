"""What tenants used and what caching saved them: the document of GET /kv/usage. Pure: numbers in, a JSON-ready dict out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, NamedTuple, Protocol

from server.pricing import Prices

REPORTED, MEASURED, ESTIMATE = "reported by the engine", "measured by the gateway", "estimate"

# name -> unit, kind, meaning. "{currency}" is the one that is configured
FIELDS: dict[str, tuple[str, str, str]] = {
    "requests": ("requests", MEASURED, "finished, whatever their status"),
    "prompt_tokens_known": ("tokens", REPORTED, "of requests whose engine said how many were cached"),
    "prompt_tokens_unknown": ("tokens", REPORTED, "of requests whose engine did not: no hit ratio holds for them"),
    "cached_tokens": ("tokens", REPORTED, "prompt tokens that came from the prefix cache"),
    "written_tokens": (
        "tokens",
        ESTIMATE,
        "known - cached: computed, and put into the cache but for a last partial block",
    ),
    "output_tokens": ("tokens", REPORTED, "generated; of a stream that broke off at least one for each event"),
    "hit_ratio": ("ratio from 0 to 1", REPORTED, "cached / known"),
    "saved_prefill_seconds": (
        "seconds",
        ESTIMATE,
        "cached tokens / measured prefill rate of the replica that answered",
    ),
    "unrated_cached_tokens": ("tokens", REPORTED, "cached while no rate was known: not part of the seconds saved"),
    "token_cost": (
        "{currency}",
        ESTIMATE,
        "at the prices of tokens; a prompt whose cached part is unknown as uncached",
    ),
    "token_saved": ("{currency}", ESTIMATE, "cached tokens at the difference of the prices of input and cached input"),
    "gpu_saved": ("{currency}", ESTIMATE, "saved_prefill_seconds at the price of the replica's GPUs"),
}


class Counted(Protocol):
    """What is read of a server.metrics.Series: one for each (route, model, tenant)."""

    labels: tuple[str, str, str]
    codes: dict[int, int]
    known: int
    unknown: int
    cached: int
    output: int
    saved_seconds: float
    unrated: int


class Counts(NamedTuple):
    """Sums over routes. Tokens; `saved` in seconds, without the `unrated` ones of the cached tokens."""

    requests: int = 0
    known: int = 0
    unknown: int = 0
    cached: int = 0
    output: int = 0
    saved: float = 0.0
    unrated: int = 0

    def plus(self, other: Counts) -> Counts:
        return Counts(
            self.requests + other.requests,
            self.known + other.known,
            self.unknown + other.unknown,
            self.cached + other.cached,
            self.output + other.output,
            self.saved + other.saved,
            self.unrated + other.unrated,
        )

    @property
    def written(self) -> int:
        return max(0, self.known - self.cached)


Usage = Mapping[tuple[str, str], Counts]  # by tenant and model


def counts(series: Iterable[Counted]) -> Usage:
    """By tenant and model, from the gateway's series."""
    sums: dict[tuple[str, str], Counts] = {}
    for s in series:
        _, model, tenant = s.labels
        more = Counts(sum(s.codes.values()), s.known, s.unknown, s.cached, s.output, s.saved_seconds, s.unrated)
        sums[tenant, model] = sums.get((tenant, model), Counts()).plus(more)
    return sums


def usage_report(usage: Usage, prices: Prices, since: float, tenant: str | None = None) -> dict[str, Any]:
    """The report of `tenant`, or of all for None. `since`: when counting began, seconds since the epoch.

    Money is a decimal text with six places, so that no reader rounds it; null where a price or a rate is missing.
    """
    shown = {key: counted for key, counted in sorted(usage.items()) if tenant in (None, key[0])}
    names = sorted({name for name, _ in shown} | ({tenant} if tenant is not None else set()))
    return {
        "since": datetime.fromtimestamp(since, UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "currency": prices.currency,
        "fields": {
            name: {"unit": unit.format(currency=prices.currency or "currency"), "kind": kind, "meaning": meaning}
            for name, (unit, kind, meaning) in FIELDS.items()
        },
        "tenants": [_tenant(name, {m: c for (t, m), c in shown.items() if t == name}, prices) for name in names],
    }


def _tenant(name: str, by_model: Mapping[str, Counts], prices: Prices) -> dict[str, Any]:
    total = Counts()
    money: list[tuple[Decimal | None, ...]] = []
    models = []
    for model, counted in by_model.items():
        amounts = _money(model, counted, prices)
        models.append({"model": model, **_row(counted, amounts)})
        money.append(amounts)
        total = total.plus(counted)
    sums = tuple(_sum(column) for column in zip(*money, strict=True)) or (None, None, None)
    return {"tenant": name, **_row(total, sums), "models": models}


def _money(model: str, c: Counts, prices: Prices) -> tuple[Decimal | None, Decimal | None, Decimal | None]:
    price = prices.of(model)
    saved = _saved(c)
    if prices.currency is None:
        return None, None, None
    cost = price.cost(c.written + c.unknown, c.cached, c.output)
    return cost, price.discount(c.cached), None if saved is None else price.time(saved)


def _row(c: Counts, money: tuple[Decimal | None, ...]) -> dict[str, Any]:
    saved = _saved(c)
    cost, discount, gpu = (None if amount is None else f"{amount:f}" for amount in money)
    return {
        "requests": c.requests,
        "prompt_tokens_known": c.known,
        "prompt_tokens_unknown": c.unknown,
        "cached_tokens": c.cached,
        "written_tokens": c.written,
        "output_tokens": c.output,
        "hit_ratio": round(c.cached / c.known, 6) if c.known else None,
        "saved_prefill_seconds": None if saved is None else round(saved, 6),
        "unrated_cached_tokens": c.unrated,
        "token_cost": cost,
        "token_saved": discount,
        "gpu_saved": gpu,
    }


def _saved(c: Counts) -> float | None:
    """Seconds; unknown where tokens were cached and no rate was known for any of them."""
    return None if c.unrated and c.unrated >= c.cached else c.saved


def _sum(column: Iterable[Decimal | None]) -> Decimal | None:
    """Of one kind of money over models; a part that is unknown makes the whole unknown."""
    total = Decimal(0)
    for amount in column:
        if amount is None:
            return None
        total += amount
    return total
