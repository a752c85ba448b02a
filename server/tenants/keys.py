"""Who sends a request: a key in its headers, looked up by its digest."""

from __future__ import annotations

import hmac
import logging
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvgate.errors import Problem, UsageError
from server.tenants.budget import NO_LIMITS, Limits
from server.tenants.entries import SECRET, KeyEntry, KeyFileContent, Role, Tenant, digest, parse

logger = logging.getLogger("kvgate")

Headers = list[tuple[bytes, bytes]]
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
MAX_FILE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Identity:
    """Who sends a request. `key_id` is "" without a key file."""

    tenant: str
    role: Role
    key_id: str


class Identifier(Protocol):
    """What the gateway asks of keys, be there a key file or none."""

    def identify(self, headers: Headers) -> Identity | Problem: ...

    def tenant(self, name: str) -> Tenant: ...

    def limits_of(self, tenant: str) -> Limits: ...


class OpenKeys:
    """No key file: everyone is the operator, and keys that a client sends are not looked at."""

    def __init__(self, limits: Limits = NO_LIMITS) -> None:
        self._identity = Identity("default", "operator", "")
        self._tenant = Tenant("default", limits)

    def identify(self, headers: Headers) -> Identity:
        return self._identity

    def tenant(self, name: str) -> Tenant:
        return self._tenant

    def limits_of(self, tenant: str) -> Limits:
        return self._tenant.limits


class Keys:
    """The keys of one reading of the file. `now` gives seconds since the epoch.

    The look-up is by the SHA-256 of what was presented. How long it takes tells nothing of the keys: whoever tries cannot
    choose a digest's first bytes, and so cannot come nearer to one, byte by byte.
    """

    __slots__ = ("_by_digest", "_now")

    def __init__(self, entries: tuple[KeyEntry, ...], now: Callable[[], float]) -> None:
        self._now = now
        self._by_digest = {
            entry.digest: (
                Identity(entry.tenant, entry.role, entry.id),
                float("inf") if entry.expires is None else entry.expires.timestamp(),
            )
            for entry in entries
        }

    def identify(self, headers: Headers) -> Identity | Problem:
        """The owner of the key in `Authorization: Bearer` or `x-api-key`; 401 without a valid one. Names are lower case."""
        presented = b""
        for name, value in headers:
            if name == b"authorization":
                if value[:7].lower() != b"bearer ":
                    continue  # another scheme is for somebody else on the way
                key = value[7:].strip()
            elif name == b"x-api-key":
                key = value.strip()
            else:
                continue
            if presented and key and not hmac.compare_digest(presented, key):
                return Problem(401, "invalid_key", "The request carries two different keys. Send one.")
            presented = key or presented
        if not presented:
            return Problem(
                401, "missing_key", "A key is missing. Send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'."
            )
        found = self._by_digest.get(digest(presented)) if SECRET.match(presented) else None
        if found is None:
            return Problem(401, "invalid_key", "The key is not valid here.")
        identity, expires = found
        if self._now() >= expires:
            return Problem(401, "expired_key", f"The key {identity.key_id} has expired.")
        return identity


class KeyFile:
    """The key file in force, read at the start and again when it has changed.

    Raises UsageError where the file cannot be read, is broken, or can be written by others than its owner.
    """

    def __init__(self, path: Path | str, now: Callable[[], float] = time.time) -> None:
        self._path = Path(path)
        self._now = now
        self._fault = ""
        self._seen, self._content = read_key_file(self._path)
        self._keys = Keys(self._content.keys, now)

    def identify(self, headers: Headers) -> Identity | Problem:
        """See Keys."""
        return self._keys.identify(headers)

    def tenant(self, name: str) -> Tenant:
        return self._content.tenant(name)

    def limits_of(self, tenant: str) -> Limits:
        return self._content.tenant(tenant).limits

    @property
    def tenants(self) -> frozenset[str]:
        """All tenants that have a key: the values that a metric's label may take."""
        return frozenset(entry.tenant for entry in self._content.keys)

    def reload_if_changed(self) -> bool:
        """Puts a changed file in force as a whole. One that cannot be leaves the old keys, and is warned of once.

        Looks at the file's state only, so it may be called every second. Whether other keys are in force now.
        """
        try:
            if signature(self._path.stat()) == self._seen:
                self._fault = ""
                return False
            self._seen, content = read_key_file(self._path)
        except (OSError, UsageError) as error:
            if str(error) != self._fault:
                self._fault = str(error)
                logger.warning("%s (the keys read before stay in force)", error)
            return False
        self._content, self._keys = content, Keys(content.keys, self._now)
        self._fault = ""
        logger.info("%s: %d keys are in force", self._path, len(content.keys))
        return True


Signature = tuple[int, int, int, int, int, int]


def signature(state: os.stat_result) -> Signature:
    """What tells one state of a file from another, its mode included."""
    return (state.st_dev, state.st_ino, state.st_mtime_ns, state.st_ctime_ns, state.st_size, state.st_mode)


def read_key_file(path: Path) -> tuple[Signature, KeyFileContent]:
    """The file's state and what it says; UsageError names what is wrong."""
    try:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            if state.st_mode & WRITABLE_BY_OTHERS:
                raise UsageError(
                    f"{path} can be written by others than its owner (mode {stat.S_IMODE(state.st_mode):04o}), who could give "
                    f"themselves a key: chmod go-w {path}"
                )
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    return signature(state), parse(data, str(path))
