"""Whose cached prefixes a request may hit: the `cache_salt` that an engine gets, over a real socket."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.fakes.behaviours import Whole
from tests.fakes.engine import FakeEngine
from tests.fakes.raw_client import post
from tests.server.exchange.test_dialects import MESSAGES, minimal
from tests.server.keyring import Headers, Keyring, answer_to
from tests.server.load import CHAT
from tests.server.running import RunningGateway, running_gateway
from tests.server.test_process import serve

SALTED = b"""{ "cache_salt" : "mine", "model":"tiny",
 "messages":[{"role":"user","content":"\\"cache_salt\\":1","cache_salt":"inner"}],
 "metadata":{"cache_salt":"inner"},"cache\\u005fsalt":"mine too","cache_salt":7, "stop":["cache_salt"] }"""


@pytest.fixture
def keys(tmp_path: Path) -> Keyring:
    keys = Keyring(tmp_path / "keys")
    keys.add("a-1", "acme")
    keys.add("a-2", "acme")
    keys.add("b-1", "bolt")
    keys.add("op-1", "ops", "operator")
    return keys


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "salt"
    path.write_text("a secret of a test's own\n")
    return str(path)


async def engine_gets(gateway: RunningGateway, engine: FakeEngine, body: bytes, headers: Headers, path: str) -> bytes:
    engine.always(Whole(body=b"{}"))
    assert (await answer_to(gateway.port, post(path, body, headers))).status == 200
    return engine.posts[-1].body


def top_level(body: bytes) -> list[tuple[str, object]]:
    """Every member of the object, duplicates included."""
    levels: list[list[tuple[str, object]]] = []

    def take(pairs: list[tuple[str, object]]) -> dict[str, object]:
        levels.append(pairs)
        return dict(pairs)

    json.loads(body, object_pairs_hook=take)
    return levels[-1]


def salt_of(body: bytes) -> str:
    """The one salt that the object names, however often."""
    (salt,) = {value for name, value in top_level(body) if name == "cache_salt"}
    assert isinstance(salt, str)
    assert re.fullmatch(r"[0-9a-f]{32}", salt)
    return salt


async def test_tenants_are_apart_and_their_keys_together(engine: FakeEngine, keys: Keyring, secret: str) -> None:
    async with running_gateway(
        engine.url, key_file=str(keys.path), isolation="tenant", salt_secret_file=secret
    ) as gateway:
        for path in (CHAT, MESSAGES, "/v1/responses", "/v1/completions"):
            a1, a2, b1 = [
                salt_of(await engine_gets(gateway, engine, minimal(path), keys.bearer(key), path))
                for key in ("a-1", "a-2", "b-1")
            ]
            assert a1 == a2 != b1


async def test_keys_are_apart(engine: FakeEngine, keys: Keyring, secret: str) -> None:
    async with running_gateway(
        engine.url, key_file=str(keys.path), isolation="key", salt_secret_file=secret
    ) as gateway:
        salts = {
            salt_of(await engine_gets(gateway, engine, minimal(CHAT), keys.bearer(key), CHAT))
            for key in ("a-1", "a-2", "b-1")
        }
        assert len(salts) == 3


async def test_no_spelling_of_a_salt_gets_past_and_nothing_else_changes(
    engine: FakeEngine, keys: Keyring, secret: str
) -> None:
    async with running_gateway(
        engine.url, key_file=str(keys.path), isolation="tenant", salt_secret_file=secret
    ) as gateway:
        got = await engine_gets(gateway, engine, SALTED, keys.bearer("a-1"), CHAT)
        salt = json.dumps(salt_of(got)).encode()
        expected = SALTED
        for value in (b"7", b'"mine"', b'"mine too"'):
            assert expected.count(value) == 1
            expected = expected.replace(value, salt)
        assert got == expected
        for own in (b'"x"', b"7", b"null", b'{"a":1}', b'""'):
            body = minimal(CHAT)[:-1] + b',"cache_salt":' + own + b"}"
            assert salt_of(await engine_gets(gateway, engine, body, keys.bearer("a-1"), CHAT))


async def test_a_salt_that_a_client_learnt_leads_to_nobody_else_s_prefixes(
    engine: FakeEngine, keys: Keyring, secret: str
) -> None:
    async with running_gateway(
        engine.url, key_file=str(keys.path), isolation="tenant", salt_secret_file=secret
    ) as gateway:
        plain = salt_of(await engine_gets(gateway, engine, minimal(CHAT), keys.bearer("a-1"), CHAT))
        finer = [
            salt_of(await engine_gets(gateway, engine, minimal(CHAT, cache_salt=plain), keys.bearer(key), CHAT))
            for key in ("a-1", "b-1")
        ]
        assert len({plain, *finer}) == 3


async def test_an_operator_s_salt_is_left(engine: FakeEngine, keys: Keyring, secret: str) -> None:
    async with running_gateway(
        engine.url, key_file=str(keys.path), isolation="key", salt_secret_file=secret
    ) as gateway:
        for body in (SALTED, minimal(CHAT)):
            assert await engine_gets(gateway, engine, body, keys.bearer("op-1"), CHAT) == body


async def test_without_a_key_file_and_where_all_share_salts_pass(
    engine: FakeEngine, keys: Keyring, secret: str
) -> None:
    async with running_gateway(engine.url, isolation="tenant", salt_secret_file=secret) as gateway:
        assert await engine_gets(gateway, engine, SALTED, [], CHAT) == SALTED
    async with running_gateway(engine.url, key_file=str(keys.path)) as gateway:
        for body in (SALTED, minimal(CHAT)):
            assert await engine_gets(gateway, engine, body, keys.bearer("a-1"), CHAT) == body


def test_the_example_secret_is_refused_at_the_start(tmp_path: Path) -> None:
    example = tmp_path / "salt"
    example.write_text("example-salt-secret-replace-me\n")
    done = serve("--engine", "http://127.0.0.1:1", "--isolation", "tenant", "--salt-secret-file", str(example))
    assert done.returncode == 2
    assert "the salt secret is the example of the documentation" in done.stderr
    assert done.stderr.count("\n") == 1
