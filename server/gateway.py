"""What every exchange shares: settings, replicas, metrics. Made once by the app factory and handed on; no globals."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from kvgate.errors import Problem
from kvgate.settings import Settings
from server.admission import Admission, admit
from server.credentials import Credentials
from server.exchange.http1 import Header
from server.metrics import GatewayMetrics
from server.models import Aliases
from server.replicas import EngineUrl, ReplicaSet
from server.routes import Route

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
    credentials: Credentials = field(default_factory=Credentials)
    aliases: Aliases = field(default_factory=Aliases)
    draining: bool = False
    new_id: RequestIds = field(default_factory=RequestIds)
    connections: set[ClientConnection] = field(default_factory=set)

    @classmethod
    def build(cls, settings: Settings, engines: list[str], registry: CollectorRegistry | None = None) -> Gateway:
        """From settings and engine URLs; raises UsageError. `registry` is a new one if not given."""
        metrics = GatewayMetrics(registry or CollectorRegistry())
        replicas = ReplicaSet([EngineUrl.parse(url) for url in engines], settings.policy, metrics)
        return cls(settings, metrics, replicas, aliases=Aliases.parse(settings.aliases))

    @property
    def ready(self) -> bool:
        return self.replicas.ready and not self.draining

    def admit(self, route: Route, headers: list[Header], body: bytes) -> Admission | Problem:
        """May this request pass, and as what. Asked by the exchanges and by the gateway's own routes alike."""
        served = self.replicas.served
        return admit(route, body, served, self.aliases) if served else self.unavailable()

    def listed_models(self) -> list[dict[str, Any]]:
        """What GET /v1/models lists: the engines' own entries, then the aliases of them (patterns name no model)."""
        by_model = self.replicas.by_model
        entries = {name: {"root": name, **holders[0].models[name]} for name, holders in by_model.items()}
        for alias, target in self.aliases.exact.items():
            if target in entries and alias not in entries:
                entries[alias] = {**entries[target], "id": alias, "root": target}
        return list(entries.values())

    def unavailable(self) -> Problem:
        """No engine can be asked now."""
        wait = max(1, round(self.settings.health_interval))
        return Problem(
            503, "engine_unavailable", "No engine answers at the moment. Try again shortly.", retry_after=wait
        )
