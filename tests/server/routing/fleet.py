"""Replicas of which a test sets what a policy sees."""

from typing import Any

from server.exchange.upstream import EnginePool
from server.replica import EngineUrl, Replica


class Rate:
    """Stands for a measured prefill rate, in tokens a second."""

    def __init__(self, tokens_per_second: float | None) -> None:
        self.tokens_per_second = tokens_per_second


def replica(number: int, rate: float | None = 1000.0, **state: Any) -> Replica:
    """`state` are further attributes."""
    host = f"10.0.0.{number}"
    made = Replica(EngineUrl("http", host, 8000), EnginePool(host, 8000, tls=False))
    made.prefill = Rate(rate)  # type: ignore[assignment]
    made.fit = made.up = True
    for name, value in state.items():
        setattr(made, name, value)
    return made
