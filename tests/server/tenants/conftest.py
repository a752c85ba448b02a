"""A real Redis, one for the session: Debian's, installed where it is missing and this is root."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import debian
from kvgate.errors import SetupError
from tests.server.tenants.redis_server import RedisServer


@pytest.fixture(scope="session")
def redis_program() -> str:
    try:
        debian.ensure(["redis-server"], "tests of shared limits")
    except SetupError as error:
        pytest.skip(str(error))  # in CI this fails
    return debian.program("redis-server")


@pytest.fixture(scope="session")
def session_redis(redis_program: str) -> Iterator[RedisServer]:
    folder = Path(tempfile.mkdtemp(prefix="kvgate-"))  # pytest's own is too long for a socket's name
    server = RedisServer(redis_program, folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


@pytest.fixture
def redis(session_redis: RedisServer) -> RedisServer:
    """Empty at the beginning of each test, and running."""
    session_redis.start()
    session_redis.flush()
    return session_redis
