"""The key file: JSON lines, so that a fault has a line, and a change leaves every other line as it was.

A line with `id` is a key, any other one a tenant; lines that are empty or begin with # are comments. See docs/keys.md.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

from kvgate.errors import UsageError
from server.tenants.budget import NO_LIMITS, Limits

Role = Literal["tenant", "operator"]

PREFIX = "kvg_"
SECRET = re.compile(rb"kvg_[A-Za-z0-9_-]{43}\Z")
EVERY_TENANT = "*"  # the line whose limits hold for tenants that have none of their own

# No : / @ \ or quotes: a tenant is a metric's label and part of a Redis key
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key. `digest` is the SHA-256 of its secret. `expires` and `created` know their zone."""

    id: str
    tenant: str
    role: Role
    digest: bytes
    created: datetime | None = None
    expires: datetime | None = None
    note: str = ""

    def line(self) -> bytes:
        """As it stands in the file, without the line's end."""
        fields: dict[str, str] = {"id": self.id, "tenant": self.tenant, "role": self.role, "sha256": self.digest.hex()}
        if self.created is not None:
            fields["created"] = timestamp(self.created)
        if self.expires is not None:
            fields["expires"] = timestamp(self.expires)
        if self.note:
            fields["note"] = self.note
        return orjson.dumps(fields)


@dataclass(frozen=True, slots=True)
class Tenant:
    """What holds for one tenant. weight: its share among those who wait. priority: of two who wait, the lower goes first."""

    name: str
    limits: Limits = NO_LIMITS
    weight: float = 1.0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class KeyFileContent:
    """What a key file says."""

    keys: tuple[KeyEntry, ...]
    tenants: Mapping[str, Tenant]

    def tenant(self, name: str) -> Tenant:
        """The tenant's own line, else the line of `*`, else a tenant without limits."""
        return self.tenants.get(name) or self.tenants.get(EVERY_TENANT) or Tenant(name)


def new_secret() -> str:
    """A key: the prefix, by which a scanner finds a leaked one, and 256 random bits."""
    return PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(32)).rstrip(b"=").decode("ascii")


def digest(secret: bytes) -> bytes:
    """What is stored of a key.

    A slow, salted hash is for passwords, which can be guessed. Nobody guesses 256 random bits, however fast the hash is,
    and two keys are never equal; so a plain SHA-256 gives nothing away, and costs a request half a microsecond.
    """
    return hashlib.sha256(secret).digest()


def timestamp(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def parse(data: bytes, source: str) -> KeyFileContent:
    """Reads a key file. UsageError names `source`, the line and the fault; it never shows a value that may be secret."""
    if not data.strip():
        # an editor's half-done write; a file of which every key was revoked still has its first comment
        raise UsageError(f"{source} is empty: `kvgate keys add` makes one, and a comment line marks one without keys")
    keys: dict[str, KeyEntry] = {}
    digests: set[bytes] = set()
    tenants: dict[str, Tenant] = {}
    for number, line in enumerate(map(bytes.strip, data.split(b"\n")), 1):
        if not line or line.startswith(b"#"):
            continue
        try:
            fields = _Fields(line)
            if "id" in fields.values:
                key = _key(fields)
                if key.id in keys:
                    raise ValueError(f"the key id {key.id} is there twice")
                if key.digest in digests:
                    raise ValueError(f"the key {key.id} has the sha256 of another")
                digests.add(key.digest)
                keys[key.id] = key
            else:
                tenant = _tenant(fields)
                if tenant.name in tenants:
                    raise ValueError(f"the tenant {tenant.name} is there twice")
                tenants[tenant.name] = tenant
        except ValueError as error:
            raise UsageError(f"{source}:{number}: {error}") from None
    return KeyFileContent(tuple(keys.values()), tenants)


class _Fields:
    """One line's fields, each taken once and checked; ValueError names the field."""

    def __init__(self, line: bytes) -> None:
        try:
            values = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ValueError(f"not a JSON object: {error.msg} at character {error.pos}") from None
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
        self.values: dict[str, Any] = values

    def text(self, name: str, form: re.Pattern[str], expected: str) -> str:
        value = self.values.pop(name, None)
        if not isinstance(value, str) or not form.match(value):
            raise ValueError(f"'{name}' must be {expected}")
        return value

    def moment(self, name: str) -> datetime | None:
        value = self.values.pop(name, None)
        if value is None:
            return None
        try:
            moment = datetime.fromisoformat(value)
        except (TypeError, ValueError):
            moment = None
        if moment is None or moment.tzinfo is None:
            raise ValueError(f"'{name}' must be a time with its zone, like 2031-01-31T12:00:00Z")
        return moment

    def count(self, name: str) -> int | None:
        value = self.values.pop(name, None)
        if value is not None and (type(value) is not int or not 1 <= value <= 10**12):
            raise ValueError(f"'{name}' must be a whole number from 1 on, or null for no limit")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.values.pop(name, default)
        if type(value) not in (int, float) or not low <= value <= high:
            raise ValueError(f"'{name}' must be a number from {low:g} to {high:g}")
        return float(value)

    def note(self) -> str:
        value = self.values.pop("note", "")
        if not isinstance(value, str):
            raise ValueError("'note' must be a text")
        return value

    def done(self) -> None:
        """A field that nobody knows is a fault: a limit with a typing error would be no limit."""
        if self.values:
            raise ValueError(f"unknown field {min(self.values)!r}")


def _key(fields: _Fields) -> KeyEntry:
    name = "a name of up to 63 letters, digits, dots, dashes and underscores"
    role = fields.values.pop("role", "tenant")
    if role not in ("tenant", "operator"):
        raise ValueError("'role' must be tenant or operator")
    key = KeyEntry(
        id=fields.text("id", NAME, name),
        tenant=fields.text("tenant", NAME, name),
        role=role,
        digest=bytes.fromhex(fields.text("sha256", re.compile(r"[0-9a-fA-F]{64}\Z"), "64 hexadecimal digits")),
        created=fields.moment("created"),
        expires=fields.moment("expires"),
        note=fields.note(),
    )
    fields.done()
    return key


def _tenant(fields: _Fields) -> Tenant:
    if fields.values.get("tenant") == EVERY_TENANT:
        name = str(fields.values.pop("tenant"))
    else:
        name = fields.text("tenant", NAME, "a name of up to 63 letters, digits, dots, dashes and underscores, or *")
    limits = Limits(
        requests_per_minute=fields.count("requests_per_minute"),
        input_tokens_per_minute=fields.count("input_tokens_per_minute"),
        output_tokens_per_minute=fields.count("output_tokens_per_minute"),
        concurrency=fields.count("concurrency"),
        cached_weight=fields.number("cached_weight", 1.0, 0.0, 1.0),
    )
    weight = fields.number("weight", 1.0, 0.001, 1000.0)
    priority = fields.values.pop("priority", 0)
    if type(priority) is not int or not -1000 <= priority <= 1000:
        raise ValueError("'priority' must be a whole number from -1000 to 1000")
    fields.note()
    fields.done()
    return Tenant(name, limits, weight, priority)
