"""What explains a choice to an operator who asks with `x-kvgate-debug: decision`: what each replica would have cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from server.routing.asked import Asked
from server.routing.cost import CostPolicy
from server.routing.policy import Policy

if TYPE_CHECKING:
    from server.exchange.http1 import Header
    from server.replica import Replica

MOST = 64  # replicas that are listed


def wants_decision(headers: Sequence[Header]) -> bool:
    return any(name == b"x-kvgate-debug" and value.strip() == b"decision" for name, value in headers)


def decision(policy: Policy | None, fit: Sequence[Replica], asked: Asked) -> bytes:
    """The header's line: replicas from the cheapest on, times in milliseconds, sizes in tokens. Empty without costs."""
    if not isinstance(policy, CostPolicy):
        return b""
    costs = sorted(zip(policy.costs(fit, asked), (replica.name for replica in fit), strict=True))[:MOST]
    parts = [
        f"{name};cost={cost.seconds * 1e3:.3f};held={cost.held};miss={cost.miss:.0f};queued={cost.queued:.0f}"
        f";rate={cost.rate:.0f};pressure={cost.pressure * 1e3:.3f};weight={cost.weight:.2f}"
        for cost, name in costs
    ]
    return f"x-kvgate-decision: {', '.join(parts)}\r\n".encode("ascii")
