"""What every exchange shares: settings, replicas, metrics. Made once by the app factory and handed on; no globals."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from kvgate.errors import Problem
from kvgate.settings import Settings
from server.admission import Admission, Route, admit
from server.metrics import GatewayMetrics
from server.replicas import EngineUrl, ReplicaSet

if TYPE_CHECKING:
    from server.exchange.protocol import ClientConnection


class RequestIds:
    """Ids that nobody else gives: a random part for the process, and a count. (Random bytes for each cost a system call.)"""

    def __init__(self) -> None:
        self._prefix = f"req-{secrets.token_hex(8)}-"
        self._count = itertools.count(1)

    def __call__(self) -> bytes:
        return f"{self._prefix}{next(self._count):x}".encode("ascii")


@dataclass(slots=True)
class Gateway:
    """One gateway, one process. `connections` are the open client connections, for the sweep of their deadlines."""

    settings: Settings
    metrics: GatewayMetrics
    replicas: ReplicaSet
    draining: bool = False
    new_id: RequestIds = field(default_factory=RequestIds)
    connections: set[ClientConnection] = field(default_factory=set)

    @classmethod
    def build(cls, settings: Settings, engines: list[str], registry: CollectorRegistry | None = None) -> Gateway:
        """From settings and engine URLs; raises UsageError. `registry` is a new one if not given."""
        metrics = GatewayMetrics(registry or CollectorRegistry())
        replicas = ReplicaSet([EngineUrl.parse(url) for url in engines], settings.policy, metrics)
        return cls(settings, metrics, replicas)

    @property
    def ready(self) -> bool:
        return self.replicas.ready and not self.draining

    def admit(self, route: Route, body: bytes) -> Admission | Problem:
        served = self.replicas.served
        return admit(route, body, served) if served else self.unavailable()

    def unavailable(self) -> Problem:
        """No engine can be asked now."""
        wait = max(1, round(self.settings.health_interval))
        return Problem(
            503, "engine_unavailable", "No engine answers at the moment. Try again shortly.", retry_after=wait
        )
