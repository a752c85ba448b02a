"""The one table of settings: command line, environment and docs/settings.md are made from it or tested against it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvgate.errors import UsageError

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Setting:
    """One row. `kind` turns the text of an environment variable into the value, and raises ValueError where it cannot."""

    name: str
    kind: type[int] | type[float] | type[str]
    default: int | float | str
    help: str
    minimum: float = 0
    maximum: float = 1e9

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return "KVGATE_" + self.name.upper()

    @property
    def unit(self) -> str:
        """What stands for the value in help texts."""
        if self.name.endswith(("_timeout", "_interval", "_delay")):
            return "SECONDS"
        if self.name.endswith("_bytes"):
            return "BYTES"
        if self.name.endswith(("_file", "_cert", "_key")):
            return "FILE"
        return "TEXT" if self.kind is str else "N"

    def parse(self, text: str, source: str) -> Any:
        try:
            value = self.kind(text)
        except ValueError:
            raise UsageError(f"{source}: {text!r} is not {_ARTICLE[self.kind]}") from None
        if not isinstance(value, str):
            if not value >= self.minimum:  # so that nan is refused, too
                raise UsageError(f"{source}: {text} is below the minimum of {self.minimum:g}")
            if value > self.maximum:
                raise UsageError(f"{source}: {text} is above the maximum of {self.maximum:g}")
        return value


_ARTICLE = {int: "a whole number", float: "a number", str: "a text"}

SETTINGS: tuple[Setting, ...] = (
    Setting("host", str, "127.0.0.1", "address that the gateway binds; any but loopback needs --insecure-no-auth"),
    Setting("port", int, 8000, "port of the gateway; 0 takes a free one", 0, 65535),
    Setting(
        "policy", str, "cost", "how a replica is chosen: cost (soonest first token), session, least-load or round-robin"
    ),
    Setting(
        "tokenizer",
        str,
        "",
        "folder with a model's config.json, tokenizer.json and template, or model=FOLDER,...; else the engine's own path",
    ),
    Setting("aliases", str, "", "further names of served models, e.g. gpt-4o=qwen3,claude-*=qwen3"),
    Setting(
        "engines_file", str, "", "file with the engines' URLs, one a line or a JSON list, reloaded when it changes"
    ),
    Setting(
        "kv_events",
        str,
        "auto",
        "where engines publish KV events: auto (ask each engine), off, or [HOST:PORT=]tcp://{host}:5557+tcp://{host}:5657",
    ),
    Setting("dns_interval", float, 5.0, "seconds between two look-ups of an engine name given as dns://name:port", 0.1),
    Setting(
        "max_inflight_per_replica",
        int,
        256,
        "requests that an engine gets at once; further ones wait in the gateway",
        1,
    ),
    Setting("queue_size", int, 1024, "requests that may wait for a place at an engine; more are answered 503"),
    Setting("queue_timeout", float, 60.0, "seconds that a request may wait for a place at an engine", 0.01),
    Setting(
        "retry_ratio",
        float,
        0.2,
        "retries at other engines, as a share of the requests; 0 leaves ten in ten seconds",
        0,
        1,
    ),
    Setting(
        "key_file", str, "", "file of keys, tenants and limits, see kvgate keys; without one everybody is the operator"
    ),
    Setting("isolation", str, "shared", "who may share cached prefixes: shared (all), tenant or key"),
    Setting(
        "salt_secret_file", str, "", "secret from which isolation makes cache salts (or environment KVGATE_SALT_SECRET)"
    ),
    Setting("redis_url", str, "", "Redis in which several gateways share limits, e.g. redis://127.0.0.1:6379/0"),
    Setting("engine_key_file", str, "", "file with the key that the engines ask for (vLLM's --api-key)"),
    Setting("cors_origins", str, "", "origins whose pages may read answers, separated by commas; * for all"),
    Setting("tls_cert", str, "", "PEM file with the certificate chain; with --tls-key the gateway speaks HTTPS"),
    Setting("tls_key", str, "", "PEM file with the certificate's key"),
    Setting("connect_timeout", float, 2.0, "seconds to reach an engine before the next one is tried", 0.01),
    Setting("first_byte_timeout", float, 600.0, "seconds until an engine's first byte, its queue included", 0.01),
    Setting("idle_timeout", float, 120.0, "seconds without a byte from an engine that had begun to answer", 0.01),
    Setting("header_timeout", float, 20.0, "seconds that a client may take to send its headers", 0.01),
    Setting("body_timeout", float, 120.0, "seconds that a client may pause while sending a body", 0.01),
    Setting("keep_alive_timeout", float, 75.0, "seconds that an unused client connection stays open", 0.01),
    Setting("max_body_bytes", int, 32 * MIB, "largest request body; more is answered 413", 1),
    Setting("max_head_bytes", int, 64 * 1024, "largest request head; more is answered 431", 1024),
    Setting(
        "max_held_bytes", int, 1 * MIB, "largest non-streamed answer held back to report its cache hit in a header", 0
    ),
    Setting("health_interval", float, 2.0, "seconds between two health checks of a replica", 0.05),
    Setting("scrape_interval", float, 5.0, "seconds between two reads of a replica's metrics", 0.05),
    Setting(
        "drain_delay",
        float,
        0.0,
        "seconds after SIGTERM in which the gateway is not ready but still takes connections: longer than a load balancer "
        "needs to notice (Kubernetes: 5); a second signal ends them",
    ),
    Setting(
        "drain_timeout", float, 300.0, "seconds that running requests may take to finish after SIGTERM and the delay"
    ),
    Setting(
        "access_log", str, "off", "where to write a JSON line for each request: off, - (standard output) or a file"
    ),
    Setting("tracing", str, "off", "off, or otlp: spans to the collector that the OTEL_* variables name (extra otel)"),
    Setting("prices", str, "", "TOML file with prices of tokens or GPUs, for GET /kv/usage"),
    Setting("log_level", str, "info", "debug, info, warning or error; no level logs prompt text or keys"),
)
BY_NAME = {s.name: s for s in SETTINGS}


@dataclass(frozen=True, slots=True)
class Settings:
    """The gateway's settings, read once. Seconds and bytes throughout; see SETTINGS for what each means."""

    host: str = "127.0.0.1"
    port: int = 8000
    policy: str = "cost"
    tokenizer: str = ""
    aliases: str = ""
    engines_file: str = ""
    kv_events: str = "auto"
    dns_interval: float = 5.0
    max_inflight_per_replica: int = 256
    queue_size: int = 1024
    queue_timeout: float = 60.0
    retry_ratio: float = 0.2
    key_file: str = ""
    isolation: str = "shared"
    salt_secret_file: str = ""
    redis_url: str = ""
    engine_key_file: str = ""
    cors_origins: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    connect_timeout: float = 2.0
    first_byte_timeout: float = 600.0
    idle_timeout: float = 120.0
    header_timeout: float = 20.0
    body_timeout: float = 120.0
    keep_alive_timeout: float = 75.0
    max_body_bytes: int = 32 * MIB
    max_head_bytes: int = 64 * 1024
    max_held_bytes: int = 1 * MIB
    health_interval: float = 2.0
    scrape_interval: float = 5.0
    drain_delay: float = 0.0
    drain_timeout: float = 300.0
    access_log: str = "off"
    tracing: str = "off"
    prices: str = ""
    log_level: str = "info"

    @classmethod
    def load(cls, given: Mapping[str, str | None], environ: Mapping[str, str] | None = None) -> Settings:
        """Command line first, then environment, then default. Raises UsageError that names the source."""
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for field in fields(cls):
            setting = BY_NAME[field.name]
            text = given.get(setting.name)
            if text is not None:
                values[setting.name] = setting.parse(text, setting.flag)
            elif setting.env in environ:
                values[setting.name] = setting.parse(environ[setting.env], setting.env)
        return cls(**values)
