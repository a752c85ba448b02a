"""pytest tests/server/tenants/test_salt.py: whose prefixes are shared with whom."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

import pytest

from kvgate.errors import UsageError
from server.tenants.keys import Identity, OpenKeys
from server.tenants.salt import EXAMPLE_SECRET, Salts, read_salt_secret

SECRET = b"0123456789abcdef"
A1 = Identity("acme", "tenant", "k-1")
A2 = Identity("acme", "tenant", "k-2")
B = Identity("k-1", "tenant", "k-3")  # a tenant with the name of another's key


def test_salts_are_hmacs_that_vllm_takes() -> None:
    salt = Salts("tenant", SECRET).salt_for(A1)
    assert salt == hmac.new(SECRET, b"tenant\0acme", hashlib.sha256).hexdigest()[:32]
    assert re.fullmatch("[0-9a-f]{32}", salt)


def test_who_shares_with_whom() -> None:
    tenant, key = Salts("tenant", SECRET), Salts("key", SECRET)
    assert tenant.salt_for(A1) == tenant.salt_for(A2) == Salts("tenant", SECRET).salt_for(A1)
    assert tenant.salt_for(A1) != tenant.salt_for(B)
    assert key.salt_for(A1) != key.salt_for(A2)
    assert key.salt_for(A1) != tenant.salt_for(B)
    assert tenant.salt_for(A1) != Salts("tenant", SECRET[::-1]).salt_for(A1)
    assert Salts("shared").salt_for(A1) is None


def test_a_clients_own_salt_makes_it_finer_and_never_another_tenants() -> None:
    salts = Salts("tenant", SECRET)
    plain, theirs = salts.salt_for(A1), salts.salt_for(B)
    assert plain is not None
    mine = {salts.salt_for(A1, sent) for sent in ("user-1", "user-2", theirs, plain)}
    assert len(mine | {plain, theirs}) == 6
    assert salts.salt_for(A1, "user-1") == salts.salt_for(A2, "user-1") != salts.salt_for(B, "user-1")
    assert salts.salt_for(A1, "") == plain


def test_operators_and_open_gateways_keep_theirs() -> None:
    for policy in ("shared", "tenant", "key"):
        salts = Salts(policy, SECRET)
        assert salts.salt_for(Identity("acme", "operator", "k-1"), "mine") is None
        assert salts.salt_for(OpenKeys().identify([]), "mine") is None


@pytest.mark.parametrize(
    ("secret", "fault"),
    [(b"", "needs a secret"), (EXAMPLE_SECRET, "is the example"), (b"0123456789abcde", "15 bytes, fewer than 16")],
)
def test_a_secret_that_is_none_is_refused(secret: bytes, fault: str) -> None:
    for policy in ("tenant", "key"):
        with pytest.raises(UsageError, match=fault) as caught:
            Salts(policy, secret)
        assert "openssl rand -hex 32" in str(caught.value)
    assert Salts("shared", secret).salt_for(A1) is None


def test_a_policy_that_there_is_none_of_is_refused() -> None:
    with pytest.raises(UsageError, match="'tennant' is not one of shared, tenant, key"):
        Salts("tennant", SECRET)


def test_the_example_is_that_of_the_documentation() -> None:
    page = Path(__file__).parents[3] / "docs/keys.md"
    assert EXAMPLE_SECRET.decode() in page.read_text()


def test_many_keys_do_not_fill_the_memory() -> None:
    salts = Salts("key", SECRET)
    for number in range(10_000):
        salts.salt_for(Identity("acme", "tenant", f"k-{number}"))
    assert len(salts._kept) <= 4096
    assert salts.salt_for(A1) == Salts("key", SECRET).salt_for(A1)


def test_the_secret_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    environ = {"KVGATE_SALT_SECRET": " of the environment "}
    assert read_salt_secret(str(file), environ) == SECRET
    assert read_salt_secret("", environ) == b"of the environment"
    assert read_salt_secret("", {}) == b""
    file.write_bytes(b"\n")
    with pytest.raises(UsageError, match="is empty"):
        read_salt_secret(str(file), environ)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_salt_secret(str(tmp_path / "none"), environ)
