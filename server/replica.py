"""One engine behind the gateway: where it listens, and what is known of it now."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from kvgate.errors import UsageError
from server.breaker import Breaker
from server.exchange.upstream import EnginePool
from server.ledger.prediction import Prediction
from server.prefill_rate import PrefillRate
from server.routing.work import Work

_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")


@dataclass(frozen=True, slots=True)
class EngineUrl:
    """Where an engine listens."""

    scheme: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str, source: str = "--engine") -> EngineUrl:
        """From `http://host:port` or `https://host:port`; raises UsageError that says what is wrong, and where."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise UsageError(f"{source} {text!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or not _HOST.fullmatch(parts.hostname):
            raise UsageError(f"{source} {text!r} is not a URL like http://127.0.0.1:8001")
        if parts.path.rstrip("/") or parts.query or parts.fragment or parts.username:
            raise UsageError(f"{source} {text!r}: give scheme, host and port only; the gateway adds the paths")
        return cls(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80))

    @property
    def name(self) -> str:
        """`host:port`, the replica's name in metrics and headers."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.name}"


class Stage(Enum):
    """A replica's life in its set."""

    ACTIVE = "active"
    DRAINING = "draining"  # not wanted any more: it gets no new request, and finishes those it has
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Replica:
    """One engine. `up`: the last word of its health check; `fit`: up, and its breaker closed; `models` maps name to entry."""

    url: EngineUrl
    pool: EnginePool
    breaker: Breaker = field(default_factory=Breaker)
    up: bool = False
    fit: bool = False
    inflight: int = 0
    stage: Stage = Stage.ACTIVE
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    prefill: PrefillRate = field(default_factory=PrefillRate)
    kv_utilization: float | None = None  # 0 to 1; None is unknown
    kv_blocks: int | None = None  # on the device, of all its data-parallel ranks
    block_size: int | None = None  # tokens
    kv_tokens: int | None = None  # that fit into these blocks
    work: Work = field(default_factory=Work)
    prediction: Prediction = field(default_factory=Prediction)
    faith: float = 1.0  # `prediction.faith`, for the policy's loop
    started: float | None = None  # seconds since the epoch: its process, as last told
    self_test: dict[str, Any] | None = None  # None while it was not tested
    name: str = field(init=False)
    header: bytes = field(init=False)  # the line that names it in an answer

    def __post_init__(self) -> None:
        self.name = self.url.name
        self.header = b"x-kvgate-replica: %b\r\n" % self.name.encode("ascii")

    def report(self) -> dict[str, Any]:
        """What GET /kv/replicas says of it; null is unknown."""
        return {
            "replica": self.name,
            "url": str(self.url),
            "stage": self.stage.value,
            "up": self.up,
            "breaker_open": self.breaker.out,
            "models": sorted(self.models),
            "inflight_requests": self.inflight,
            "kv_utilization_ratio": self.kv_utilization,
            "kv_blocks": self.kv_blocks,
            "block_size_tokens": self.block_size,
            "prefill_tokens_per_second": self.prefill.tokens_per_second,
            "queued_tokens": self.work.queued,
            "prediction": self.prediction.report(),
            "self_test": self.self_test,
        }
