"""The body of GET /kv/ledger: what could have hit, what was routed to hit, what hit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from server.metrics import Series

_FIELDS = ("known", "unknown", "matched", "available", "routed", "matched_delivered", "in_flight")


def ledger_report(every: Iterable[Series], since: float, tenant: str | None = None) -> dict[str, Any]:
    """By model and tenant, all or one tenant's, in tokens; `since` in seconds since the epoch.

    The three numbers are of the same requests: those whose prompt was matched and of which the engine said what it
    delivered. The others are apart: `unmatched_prompt_tokens`, and `unreported_prompt_tokens` where the engine did not say.
    """
    sums: dict[tuple[str, str], dict[str, int]] = {}
    for series in every:
        _, model, owner = series.labels
        if tenant is None or owner == tenant:
            row = sums.setdefault((model, owner), dict.fromkeys(_FIELDS, 0))
            for name in _FIELDS:
                row[name] += getattr(series, name)
    return {
        "since": since,
        "unit": "tokens",
        "rows": [_row(model, owner, row) for (model, owner), row in sorted(sums.items()) if any(row.values())],
    }


def _row(model: str, tenant: str, row: dict[str, int]) -> dict[str, Any]:
    return {
        "model": model,
        "tenant": tenant,
        "prompt_tokens": row["matched"],
        "available_tokens": row["available"],
        "routed_tokens": row["routed"],
        "delivered_tokens": row["matched_delivered"],
        "routing_loss_tokens": row["available"] - row["routed"],
        "engine_loss_tokens": row["routed"] - row["matched_delivered"],
        "routed_behind_a_twin_tokens": row["in_flight"],
        "unmatched_prompt_tokens": row["known"] - row["matched"],
        "unreported_prompt_tokens": row["unknown"],
    }
