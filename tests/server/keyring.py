"""A key file of a test's own, and the secrets behind it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from server.tenants.entries import KeyEntry, Role, digest, new_secret
from tests.fakes.raw_client import RawClient, Response

Headers = list[tuple[str, str]]


class Keyring:
    """Each change is written at once, and replaces the file as `kvgate keys` does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.secrets: dict[str, str] = {}
        self._keys: dict[str, bytes] = {}
        self._tenants: dict[str, bytes] = {}
        self.write(b"# none yet\n")

    def add(self, key_id: str, tenant: str = "acme", role: Role = "tenant") -> str:
        secret = self.secrets[key_id] = new_secret()
        self._keys[key_id] = KeyEntry(key_id, tenant, role, digest(secret.encode())).line()
        self._changed()
        return secret

    def revoke(self, key_id: str) -> None:
        del self._keys[key_id]
        self._changed()

    def limit(self, tenant: str, **limits: float) -> None:
        self._tenants[tenant] = json.dumps({"tenant": tenant, **limits}).encode()
        self._changed()

    def _changed(self) -> None:
        self.write(b"\n".join((b"# keys", *self._keys.values(), *self._tenants.values(), b"")))

    def write(self, data: bytes) -> None:
        new = self.path.with_suffix(".new")
        new.write_bytes(data)
        new.chmod(0o600)
        os.replace(new, self.path)

    def bearer(self, key_id: str) -> Headers:
        return [("authorization", f"Bearer {self.secrets[key_id]}")]

    def x_api_key(self, key_id: str) -> Headers:
        return [("x-api-key", self.secrets[key_id])]


async def answer_to(port: int, request: bytes) -> Response:
    """On a connection of its own."""
    async with await RawClient.connect(port) as client:
        await client.send(request)
        return await client.read_response(10.0, method=request.partition(b" ")[0].decode())
