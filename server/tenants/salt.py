"""Whose prefixes may be reused by whom: the salt that vLLM mixes into the hash of a prompt's first block.

The salt is HMAC-SHA256 of the tenant or key, cut to 128 bits in 32 hexadecimal digits, which vLLM takes (no @ / \\ or NUL).
Without the secret nobody computes another's. That any two of n salts are equal has a probability below n²/2^129: 1.5e-27
for a million.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from kvgate.errors import UsageError
from server.tenants.keys import Identity

Isolation = Literal["shared", "tenant", "key"]

SECRET_ENV = "KVGATE_SALT_SECRET"  # noqa: S105  the variable's name
EXAMPLE_SECRET = b"example-salt-secret-replace-me"  # stands in docs/keys.md
MIN_SECRET_BYTES = 16
MAX_KEPT = 4096  # salts; there are no more than tenants or keys, until the key file has changed often


class Salts:
    """The isolation policy. Raises UsageError for a policy that there is none of, or a secret that is none."""

    def __init__(self, policy: str, secret: bytes = b"") -> None:
        if policy not in get_args(Isolation):
            raise UsageError(f"isolation {policy!r} is not one of {', '.join(get_args(Isolation))}")
        if policy != "shared":
            check_secret(secret, f"isolation {policy}")
        self._by_key = policy == "key"
        self._shared = policy == "shared"
        self._secret = secret
        self._kept: dict[str, str] = {}

    def salt_for(self, identity: Identity, sent: str | None = None) -> str | None:
        """The salt to put in place of the client's; None leaves the request as it is.

        An operator's salt is left, and so is everyone's without a key file or with `shared`. With `sent`, the client's own
        salt, the result stands for both: who asked for a finer isolation than the tenant's keeps it.
        """
        if self._shared or identity.role == "operator":
            return None
        owner = f"key\0{identity.key_id}" if self._by_key else f"tenant\0{identity.tenant}"
        if sent:
            return self._digest(f"{owner}\0{sent}")
        salt = self._kept.get(owner)
        if salt is None:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            salt = self._kept[owner] = self._digest(owner)
        return salt

    def _digest(self, text: str) -> str:
        return hmac.digest(self._secret, text.encode("utf-8", "surrogatepass"), "sha256").hex()[:32]


def check_secret(secret: bytes, wanted_by: str) -> None:
    """UsageError unless it is a secret: not missing, not short, not the one of the documentation."""
    how = f"put one in the file that is configured or in {SECRET_ENV}, e.g. the output of `openssl rand -hex 32`"
    if not secret:
        raise UsageError(f"{wanted_by} needs a secret for the salts: {how}")
    if secret == EXAMPLE_SECRET:
        raise UsageError(f"the salt secret is the example of the documentation, which everybody knows: {how}")
    if len(secret) < MIN_SECRET_BYTES:
        raise UsageError(f"the salt secret has {len(secret)} bytes, fewer than {MIN_SECRET_BYTES}: {how}")


def read_salt_secret(file: str, environ: Mapping[str, str]) -> bytes:
    """The secret of `file` if one is named, else of the environment; b"" where there is none. White space around it goes."""
    if not file:
        return environ.get(SECRET_ENV, "").strip().encode("utf-8", "surrogateescape")
    try:
        secret = Path(file).read_bytes().strip()
    except OSError as error:
        raise UsageError(f"the file of the salt secret, {file}, cannot be read: {error.strerror or error}") from None
    if not secret:
        raise UsageError(f"the file of the salt secret, {file}, is empty")
    return secret
