"""What every exchange shares. Made once, by `Gateway.build`, and handed on; no globals."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from kvgate.errors import Problem, SetupError, UsageError
from kvgate.settings import Settings
from server.access_log import AccessLog
from server.admission import Admission, admit
from server.cors import Cors
from server.credentials import Credentials
from server.discovery.discovery import Discovery, sources_for
from server.ledger.ledger import Ledger
from server.metrics import GatewayMetrics
from server.models import Aliases
from server.pricing import Prices
from server.queues import AdmissionQueues
from server.replicas import ReplicaSet
from server.retries import RetryBudget
from server.routes import Route
from server.routing.asked import Asked
from server.routing.session import session_of
from server.tenants.keys import Identifier, Identity, KeyFile, OpenKeys
from server.tenants.limits import MemoryLimits
from server.tenants.salt import Salts, read_salt_secret
from server.tracing import Tracer, open_tracer

if TYPE_CHECKING:
    from server.exchange.protocol import ClientConnection
    from server.tenants.redis_limits import RedisLimits

BYTES_PER_TOKEN = (
    4  # of a request body, for limits, until the engine has counted: English prose and code have about as many
)


class RequestIds:
    """Ids that nobody else gives: a random part for the process, and a count. (Random bytes for each cost a system call.)"""

    def __init__(self) -> None:
        self._prefix = b"req-%b-" % secrets.token_hex(8).encode("ascii")
        self._count = itertools.count(1)

    def __call__(self) -> bytes:
        return b"%b%x" % (self._prefix, next(self._count))


@dataclass(slots=True)
class Gateway:
    """One gateway, one process. `connections` are the open client connections, for the sweep of their deadlines."""

    settings: Settings
    metrics: GatewayMetrics
    replicas: ReplicaSet
    discovery: Discovery
    keys: Identifier
    limits: MemoryLimits | RedisLimits
    salts: Salts
    queues: AdmissionQueues
    credentials: Credentials
    aliases: Aliases
    cors: Cors
    retry_budget: RetryBudget
    access_log: AccessLog
    tracer: Tracer
    prices: Prices
    ledger: Ledger | None = None  # with policies that go by it
    since: float = field(default_factory=time)  # seconds since the epoch: from when on usage is counted
    draining: bool = False
    new_id: RequestIds = field(default_factory=RequestIds)
    connections: set[ClientConnection] = field(default_factory=set)
    idle_seconds: float = field(init=False)  # that an unused client connection stays open

    def __post_init__(self) -> None:
        self.idle_seconds = self.settings.keep_alive_timeout

    @classmethod
    def build(cls, settings: Settings, engines: list[str], registry: CollectorRegistry | None = None) -> Gateway:
        """From settings and engines (URLs, dns://name:port); raises UsageError. `registry` is a new one if not given."""
        metrics = GatewayMetrics(registry or CollectorRegistry())
        replicas = ReplicaSet((), settings.policy, metrics, max_inflight=settings.max_inflight_per_replica)
        sources = sources_for(engines, settings.engines_file, settings.dns_interval)
        keys: Identifier = KeyFile(settings.key_file) if settings.key_file else OpenKeys()
        limits = _shared_limits(settings.redis_url, keys) if settings.redis_url else MemoryLimits(keys.limits_of)
        if settings.isolation == "shared":
            salts = Salts("shared")
        else:
            salts = Salts(settings.isolation, read_salt_secret(settings.salt_secret_file, os.environ))
        queues = AdmissionQueues(replicas.capacity, settings.queue_size, settings.queue_timeout)
        replicas.on_capacity = queues.fill
        credentials = Credentials(_read_key(settings.engine_key_file), guarded=bool(settings.key_file))
        ledger = Ledger(settings, metrics, credentials.headers) if settings.policy == "cost" else None
        if ledger is not None:
            replicas.on_learn, replicas.on_gone, replicas.on_restart = ledger.learn, ledger.drop, ledger.restarted
        metrics.watch_queue(lambda: queues.waiting, queues.oldest_age)
        return cls(
            settings,
            metrics,
            replicas,
            Discovery(sources, replicas.reconcile),
            keys,
            limits,
            salts,
            queues,
            credentials,
            Aliases.parse(settings.aliases),
            Cors(settings.cors_origins),
            RetryBudget(settings.retry_ratio),
            AccessLog(settings.access_log),
            open_tracer(settings.tracing, "https" if settings.tls_cert else "http"),
            Prices.load(settings.prices) if settings.prices else Prices.none(),
            ledger,
        )

    @property
    def ready(self) -> bool:
        return self.replicas.ready and not self.draining

    def admit(
        self, route: Route, identity: Identity, body: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> Admission | Problem:
        """May this request pass, and as what."""
        served, ledger = self.replicas.served, self.ledger
        if not served:
            return self.unavailable()
        ask: Callable[[str, dict[str, Any], str | None], Asked] | None = None
        if ledger is not None and route.computes:

            def ask(model: str, fields: dict[str, Any], salt: str | None) -> Asked:
                asked = ledger.ask(route.path, model, fields, salt, len(body))
                asked.tokens = asked.tokens or self._guessed_tokens(model, len(body))
                return asked

        elif self.replicas.policy is not None:

            def ask(model: str, fields: dict[str, Any], salt: str | None) -> Asked:
                return Asked(session=session_of(headers, fields))

        return admit(route, body, served, self.aliases, lambda sent: self.salts.salt_for(identity, sent), ask)

    def identify(self, headers: list[tuple[bytes, bytes]], *, operator: bool = False) -> Identity:
        """Who asks for one of the gateway's own routes; raises Problem."""
        identity = self.keys.identify(headers)
        if isinstance(identity, Problem):
            raise identity
        if operator and identity.role != "operator":
            raise Problem(403, "operator_only", "This is for keys with the role operator.")
        return identity

    def estimated_tokens(self, body_bytes: int) -> int:
        """Prompt tokens of a request, for limits, before the engine has counted them. An estimate."""
        return body_bytes // BYTES_PER_TOKEN

    def _guessed_tokens(self, model: str, body_bytes: int) -> int:
        """Prompt tokens of a request whose prompt is not known: an image takes far more bytes than the model has room for."""
        entries = self.replicas.by_model[model][0].models.values()  # all: an adapter's own entry says nothing
        longest = max((room for entry in entries if type(room := entry.get("max_model_len")) is int), default=None)
        guess = self.estimated_tokens(body_bytes)
        return guess if longest is None else min(guess, longest)

    def listed_models(self) -> list[dict[str, Any]]:
        """What GET /v1/models lists: the engines' own entries, then the aliases of them (patterns name no model)."""
        by_model = self.replicas.by_model
        entries = {name: {"root": name, **holders[0].models[name]} for name, holders in by_model.items()}
        for alias, target in self.aliases.exact.items():
            if target in entries and alias not in entries:
                entries[alias] = {**entries[target], "id": alias, "root": target}
        return list(entries.values())

    @staticmethod
    def going() -> Problem:
        """The gateway ends, and cannot wait for this request any longer."""
        return Problem(
            503, "draining", "The gateway is going down. Send the request again.", retry_after=1, reason="draining"
        )

    def unavailable(self) -> Problem:
        """No engine can be asked now."""
        wait = max(1, round(self.settings.health_interval))
        return Problem(
            503,
            "engine_unavailable",
            "No engine answers at the moment. Try again shortly.",
            retry_after=wait,
            reason="no_engine",
        )


def _shared_limits(url: str, keys: Identifier) -> RedisLimits:
    try:
        from server.tenants.redis_limits import RedisLimits
    except ModuleNotFoundError as error:
        raise SetupError(f"--redis-url needs the extra `redis` of kvgate ({error})") from error
    return RedisLimits(url, keys.limits_of)


def _read_key(path: str) -> str | None:
    """The engines' key, from a file; None without one."""
    if not path:
        return None
    try:
        key = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--engine-key-file {path}: {error}") from None
    if not key or not key.isprintable() or " " in key:
        raise UsageError(f"--engine-key-file {path}: it must hold one key on one line")
    return key
