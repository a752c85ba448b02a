"""The engines behind the gateway, what is known of each, and the choice of one for a request."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kvgate.errors import UsageError
from server.exchange.upstream import EnginePool
from server.metrics import GatewayMetrics

POLICIES = ("least-load", "round-robin")


@dataclass(frozen=True, slots=True)
class EngineUrl:
    """Where an engine listens."""

    scheme: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> EngineUrl:
        """From `http://host:port` or `https://host:port`; raises UsageError that says what is wrong."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise UsageError(f"--engine {text!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--engine {text!r} is not a URL like http://127.0.0.1:8001")
        if parts.path.rstrip("/") or parts.query or parts.fragment or parts.username:
            raise UsageError(f"--engine {text!r}: give scheme, host and port only; the gateway adds the paths")
        return cls(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80))

    @property
    def name(self) -> str:
        """`host:port`, the replica's name in metrics and headers."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.name}"


@dataclass(slots=True, eq=False)
class Replica:
    """One engine. `up` is the last word of its health check or of a failed connection; `models` maps name to its entry."""

    url: EngineUrl
    pool: EnginePool
    up: bool = False
    inflight: int = 0
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    name: str = field(init=False)
    header: bytes = field(init=False)  # the line that names it in an answer

    def __post_init__(self) -> None:
        self.name = self.url.name
        self.header = b"x-kvgate-replica: %b\r\n" % self.name.encode("ascii")


class ReplicaSet:
    """All replicas and the policy that picks among them."""

    def __init__(self, urls: Iterable[EngineUrl], policy: str, metrics: GatewayMetrics) -> None:
        if policy not in POLICIES:
            raise UsageError(f"--policy {policy!r} is not one of {', '.join(POLICIES)}")
        self._round_robin = policy == "round-robin"
        self._turn = 0
        self._metrics = metrics
        self.all = [Replica(url, EnginePool(url.host, url.port, tls=url.scheme == "https")) for url in urls]
        names = [replica.name for replica in self.all]
        if len(set(names)) != len(names):
            raise UsageError(f"--engine names the same engine twice: {', '.join(sorted(names))}")
        self.by_model: dict[str, list[Replica]] = {}
        for replica in self.all:
            metrics.replica_up.labels(replica.name).set(0)
            metrics.inflight.labels(replica.name).set_function(lambda replica=replica: replica.inflight)  # type: ignore[misc]

    @property
    def served(self) -> Collection[str]:
        """Every model name that some replica has told, now or before it went down."""
        return self.by_model.keys()

    @property
    def ready(self) -> bool:
        return any(replica.up and replica.models for replica in self.all)

    def mark(self, replica: Replica, up: bool) -> None:
        """Notes whether a replica answers."""
        if replica.up != up:
            replica.up = up
            self._metrics.replica_up.labels(replica.name).set(int(up))

    def learn(self, replica: Replica, models: dict[str, dict[str, Any]]) -> None:
        """Notes which models a replica serves."""
        if replica.models.keys() != models.keys():
            replica.models = models
            self.by_model = {
                name: [r for r in self.all if name in r.models]
                for name in sorted({name for r in self.all for name in r.models})
            }
        else:
            replica.models = models

    def pick(self, model: str, tried: Collection[Replica] = ()) -> Replica | None:
        """A replica that is up and serves `model`, none of `tried`; None if there is none. Ties rotate."""
        choices = [r for r in self.by_model.get(model, ()) if r.up and r not in tried]
        if len(choices) < 2:
            return choices[0] if choices else None
        self._turn = turn = self._turn + 1
        if not self._round_robin:
            least = min(r.inflight for r in choices)
            choices = [r for r in choices if r.inflight == least]
        return choices[turn % len(choices)]
