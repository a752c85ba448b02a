"""pytest tests/server/tenants/test_keys.py: who a request's headers say it is, and the key file behind it."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.errors import Problem, UsageError
from server.tenants.budget import Limits
from server.tenants.entries import KeyEntry, digest, new_secret, parse
from server.tenants.keys import Headers, Identity, KeyFile, Keys, OpenKeys

HEADER = b"# keys\n"
NOW = datetime(2030, 1, 1, tzinfo=UTC).timestamp()


class Clock:
    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def entry(secret: str, name: str = "k-1", **fields: object) -> bytes:
    given = {"id": name, "tenant": "acme", "sha256": digest(secret.encode()).hex(), **fields}
    return orjson.dumps(given) + b"\n"


def written(path: Path, data: bytes, mode: int = 0o600) -> Path:
    """Replaced as `kvgate keys` does, so that the state of the file differs."""
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.chmod(mode)
    os.replace(new, path)
    return path


def bearer(secret: str) -> Headers:
    return [(b"host", b"x"), (b"authorization", b"Bearer " + secret.encode())]


def code(answer: Identity | Problem) -> str:
    assert isinstance(answer, Problem)
    assert answer.status == 401
    return answer.code


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture
def secret() -> str:
    return new_secret()


def test_both_headers_carry_a_key(path: Path, secret: str) -> None:
    keys = KeyFile(written(path, HEADER + entry(secret, role="operator")))
    acme = Identity("acme", "operator", "k-1")
    raw = secret.encode()
    assert keys.identify(bearer(secret)) == acme
    assert keys.identify([(b"x-api-key", raw)]) == acme
    assert keys.identify([(b"authorization", b"bearer  " + raw + b" ")]) == acme
    assert keys.identify([(b"authorization", b"Basic dXNlcjpwYXNz"), (b"x-api-key", raw)]) == acme
    assert keys.identify([(b"authorization", b"Bearer " + raw), (b"x-api-key", raw)]) == acme
    assert keys.identify([(b"authorization", b"Bearer "), (b"x-api-key", raw)]) == acme
    assert keys.tenants == {"acme"}


def test_no_key_a_wrong_key_two_keys(path: Path, secret: str) -> None:
    other = new_secret()
    keys = KeyFile(written(path, HEADER + entry(secret) + entry(other, "k-2")))
    assert code(keys.identify([])) == "missing_key"
    assert code(keys.identify([(b"authorization", b"Basic dXNlcjpwYXNz")])) == "missing_key"
    assert code(keys.identify(bearer(new_secret()))) == "invalid_key"
    assert code(keys.identify(bearer(secret[:-1]))) == "invalid_key"
    assert code(keys.identify([*bearer(secret), (b"x-api-key", other.encode())])) == "invalid_key"
    assert code(keys.identify([*bearer(secret), (b"authorization", b"Bearer " + other.encode())])) == "invalid_key"


def test_a_password_is_never_a_key(path: Path) -> None:
    """Even where somebody has written its hash into the file: a fast hash protects no password."""
    keys = KeyFile(written(path, HEADER + entry("hunter2")))
    assert code(keys.identify(bearer("hunter2"))) == "invalid_key"


def test_no_answer_shows_the_key(path: Path, secret: str) -> None:
    clock = Clock()
    keys = KeyFile(written(path, HEADER + entry(secret, expires="2030-01-01T00:00:10Z")), clock)
    other = new_secret()
    clock.now += 60
    for headers in (bearer(secret), bearer(other), [*bearer(secret), (b"x-api-key", other.encode())]):
        problem = keys.identify(headers)
        assert isinstance(problem, Problem)
        assert secret[4:] not in str(problem)
        assert other[4:] not in str(problem)


def test_a_key_ends_in_the_second_it_says(path: Path, secret: str) -> None:
    clock = Clock()
    keys = KeyFile(written(path, HEADER + entry(secret, expires="2030-01-01T01:00:10+01:00")), clock)
    clock.now = NOW + 9.9
    assert isinstance(keys.identify(bearer(secret)), Identity)
    clock.now = NOW + 10
    assert code(keys.identify(bearer(secret))) == "expired_key"


def test_a_key_is_rotated_without_a_gap(path: Path, secret: str) -> None:
    new = new_secret()
    keys = KeyFile(written(path, HEADER + entry(secret)))
    written(path, HEADER + entry(secret) + entry(new, "k-2"))
    assert keys.reload_if_changed()
    assert keys.identify(bearer(secret)) == Identity("acme", "tenant", "k-1")
    assert keys.identify(bearer(new)) == Identity("acme", "tenant", "k-2")
    written(path, HEADER + entry(new, "k-2"))
    assert keys.reload_if_changed()
    assert code(keys.identify(bearer(secret))) == "invalid_key"
    assert not keys.reload_if_changed()


def test_all_keys_can_be_revoked(path: Path, secret: str) -> None:
    keys = KeyFile(written(path, HEADER + entry(secret)))
    written(path, HEADER)
    assert keys.reload_if_changed()
    assert code(keys.identify(bearer(secret))) == "invalid_key"


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b'# one\n\n{"id": "a", \n', r"keys:3: not a JSON object"),
        (b"[1]\n", r"keys:1: not a JSON object"),
        (b"", r"keys is empty"),
        (HEADER + entry("x", role="root"), r"keys:2: 'role' must be tenant or operator"),
        (HEADER + entry("x", "a/b"), r"keys:2: 'id' must be a name"),
        (HEADER + entry("x", tenant="acme:9"), r"keys:2: 'tenant' must be a name"),
        (HEADER + entry("x", tenant="*"), r"keys:2: 'tenant' must be a name"),
        (HEADER + entry("x", expires="2030-01-01"), r"keys:2: 'expires' must be a time with its zone"),
        (HEADER + entry("x", expires=7), r"keys:2: 'expires' must be a time with its zone"),
        (HEADER + entry("x", expire="2030-01-01T00:00:00Z"), r"keys:2: unknown field 'expire'"),
        (HEADER + entry("x", sha256="kvg_secret"), r"keys:2: 'sha256' must be 64 hexadecimal digits$"),
        (HEADER + entry("x") + entry("y"), r"keys:3: the key id k-1 is there twice"),
        (HEADER + entry("x") + entry("x", "k-2"), r"keys:3: the key k-2 has the sha256 of another"),
        (b'{"tenant": "a", "requests_per_minute": 0}', r"keys:1: 'requests_per_minute' must be a whole number from 1"),
        (b'{"tenant": "a", "request_per_minute": 5}', r"keys:1: unknown field 'request_per_minute'"),
        (b'{"tenant": "a", "cached_weight": 2}', r"keys:1: 'cached_weight' must be a number from 0 to 1"),
        (b'{"tenant": "a", "cached_weight": true}', r"keys:1: 'cached_weight' must be a number from 0 to 1"),
        (b'{"tenant": "a", "priority": 1.5}', r"keys:1: 'priority' must be a whole number"),
        (b'{"tenant": "a", "weight": 0}', r"keys:1: 'weight' must be a number from 0.001"),
        (b'{"tenant": "a"}\n{"tenant": "a"}', r"keys:2: the tenant a is there twice"),
    ],
)
def test_a_broken_file_is_refused_at_the_start_and_never_comes_into_force(
    path: Path, secret: str, data: bytes, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match=fault):
        KeyFile(written(path, data))

    keys = KeyFile(written(path, HEADER + entry(secret)))
    written(path, data)
    with caplog.at_level(logging.WARNING, "kvgate"):
        for _ in range(3):
            assert not keys.reload_if_changed()
    (warning,) = caplog.records
    assert fault.split(":")[0].split()[0] in warning.getMessage()
    assert "the keys read before stay in force" in warning.getMessage()
    assert isinstance(keys.identify(bearer(secret)), Identity)

    written(path, HEADER + entry(secret, "k-9"))
    assert keys.reload_if_changed()
    assert keys.identify(bearer(secret)) == Identity("acme", "tenant", "k-9")


def test_a_file_that_vanishes_leaves_its_keys_in_force(
    path: Path, secret: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = KeyFile(written(path, HEADER + entry(secret)))
    path.unlink()
    assert not keys.reload_if_changed()
    assert not keys.reload_if_changed()
    assert len(caplog.records) == 1
    assert isinstance(keys.identify(bearer(secret)), Identity)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        KeyFile(path)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_refused(path: Path, secret: str, mode: int) -> None:
    data = HEADER + entry(secret)
    with pytest.raises(UsageError, match=r"can be written by others.*chmod go-w"):
        KeyFile(written(path, data, mode))
    keys = KeyFile(written(path, data, 0o640))
    path.chmod(mode)  # later on, too, nothing is read from it
    assert not keys.reload_if_changed()
    path.chmod(0o600)
    assert keys.reload_if_changed()


def test_tenants_have_their_own_limits_or_those_of_all(path: Path) -> None:
    lines = (
        b'{"tenant": "acme", "requests_per_minute": 60, "input_tokens_per_minute": null, "cached_weight": 0.1, "weight": 2,'
        b' "priority": -1, "note": "pays"}\n{"tenant": "*", "concurrency": 4}\n'
    )
    keys = KeyFile(written(path, lines))
    assert keys.limits_of("acme") == Limits(requests_per_minute=60, cached_weight=0.1)
    assert (keys.tenant("acme").weight, keys.tenant("acme").priority) == (2.0, -1)
    assert keys.limits_of("else") == Limits(concurrency=4)
    assert KeyFile(written(path, HEADER)).limits_of("else").unlimited


def test_without_a_key_file_everybody_is_the_operator() -> None:
    keys = OpenKeys(Limits(concurrency=3))
    assert keys.identify([(b"authorization", b"Bearer sk-anything")]) == Identity("default", "operator", "")
    assert keys.limits_of("default") == Limits(concurrency=3)


def test_secrets_are_random_and_recognisable() -> None:
    made = {new_secret() for _ in range(200)}
    assert len(made) == 200
    assert all(len(secret) == 47 and secret.startswith("kvg_") for secret in made)


def test_an_entry_is_read_as_it_was_written() -> None:
    moment = datetime(2031, 1, 31, 12, tzinfo=UTC)
    for key in (
        KeyEntry("k-1", "acme", "operator", b"\x01" * 32, moment, moment, 'for "ci"'),
        KeyEntry("k-1", "acme", "tenant", b"\x02" * 32),
    ):
        assert parse(key.line(), "x").keys == (key,)


@given(st.lists(st.tuples(st.sampled_from([b"authorization", b"x-api-key", b"accept"]), st.binary(max_size=60))))
def test_any_bytes_are_answered(headers: Headers) -> None:
    keys = Keys((KeyEntry("k-1", "acme", "tenant", b"\x01" * 32),), Clock())
    assert code(keys.identify(headers)) in ("missing_key", "invalid_key")


@given(st.binary(max_size=200))
def test_any_file_is_read_or_refused(data: bytes) -> None:
    with suppress(UsageError):
        parse(data, "x")
