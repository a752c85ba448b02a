"""The key file changes while the gateway runs."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from server import upkeep
from tests.fakes.engine import FakeEngine
from tests.fakes.raw_client import RawClient, post
from tests.server.keyring import Keyring, answer_to
from tests.server.load import CHAT, PLAIN
from tests.server.running import RunningGateway, running_gateway
from tests.server.test_failover import until


@pytest.fixture
def keys(tmp_path: Path) -> Keyring:
    keys = Keyring(tmp_path / "keys")
    keys.add("old")
    return keys


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "KEY_FILE_SECONDS", 0.02)


@pytest.fixture
def hangups_are_harmless() -> Iterator[None]:
    """So that a gateway that does not take SIGHUP fails its test, and not all of them."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


async def status(gateway: RunningGateway, secret: str) -> int:
    return (await answer_to(gateway.port, post(CHAT, PLAIN, [("x-api-key", secret)]))).status


async def becomes(gateway: RunningGateway, secret: str, expected: int) -> None:
    async with asyncio.timeout(5):
        while await status(gateway, secret) != expected:
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("often")
async def test_a_key_is_rotated_under_load_without_a_refusal(engine: FakeEngine, keys: Keyring) -> None:
    use = keys.secrets["old"]
    statuses: list[int] = []

    async def asks(gateway: RunningGateway) -> None:
        async with await RawClient.connect(gateway.port) as client:
            while True:
                await client.send(post(CHAT, PLAIN, [("authorization", f"Bearer {use}")]))
                statuses.append((await client.read_response()).status)

    async with running_gateway(engine.url, key_file=str(keys.path)) as gateway:
        clients = [asyncio.create_task(asks(gateway)) for _ in range(4)]
        await until(lambda: len(statuses) > 20)
        new = keys.add("new")
        await becomes(gateway, new, 200)
        use = new
        seen = len(statuses)
        await until(lambda: len(statuses) > seen + 20)
        keys.revoke("old")
        await becomes(gateway, keys.secrets["old"], 401)
        seen = len(statuses)
        await until(lambda: len(statuses) > seen + 20)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    assert set(statuses) == {200}


@pytest.mark.usefixtures("often")
async def test_a_broken_file_leaves_the_keys_and_says_so_once(
    engine: FakeEngine, keys: Keyring, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvgate")
    good = keys.path.read_bytes()
    async with running_gateway(engine.url, key_file=str(keys.path)) as gateway:
        keys.write(good + b'{"id":"k-2","tenant":"acme","sha256":"hunter2"}\n')
        await until(lambda: "stay in force" in caplog.text)
        assert await status(gateway, keys.secrets["old"]) == 200
        await asyncio.sleep(0.1)  # several further looks
        new = keys.add("new")
        await becomes(gateway, new, 200)
        assert await status(gateway, keys.secrets["old"]) == 200
    (warning,) = [record.getMessage() for record in caplog.records if record.module == "keys"]
    assert f"{keys.path}:3: 'sha256' must be 64 hexadecimal digits" in warning
    assert "hunter2" not in warning


@pytest.mark.usefixtures("often")
async def test_a_limit_that_changes_counts_from_then_on(engine: FakeEngine, keys: Keyring) -> None:
    async with running_gateway(engine.url, key_file=str(keys.path)) as gateway:
        for _ in range(3):
            assert await status(gateway, keys.secrets["old"]) == 200
        keys.limit("acme", requests_per_minute=1)
        await becomes(gateway, keys.secrets["old"], 429)
        keys.limit("acme", requests_per_minute=6000)
        await becomes(gateway, keys.secrets["old"], 200)


@pytest.mark.usefixtures("hangups_are_harmless")
async def test_sighup_reads_keys_and_opens_the_access_log_at_once(
    engine: FakeEngine, keys: Keyring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "KEY_FILE_SECONDS", 3600.0)
    log = tmp_path / "access.log"
    async with running_gateway(engine.url, key_file=str(keys.path), access_log=str(log)) as gateway:
        new = keys.add("new")
        keys.revoke("old")
        assert (await status(gateway, new), await status(gateway, keys.secrets["old"])) == (401, 200)
        log.rename(tmp_path / "access.log.1")
        os.kill(os.getpid(), signal.SIGHUP)
        await becomes(gateway, new, 200)
        assert await status(gateway, keys.secrets["old"]) == 401
    assert log.read_text().count("\n") >= 2
