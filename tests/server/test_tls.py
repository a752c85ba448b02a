"""HTTPS by certificate files, as a user runs it."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from kvgate.errors import UsageError
from kvgate.settings import Settings
from server.run import check_tls
from tests.fakes import behaviours
from tests.fakes.engine import FakeEngine
from tests.fakes.raw_client import RawClient, get, post
from tests.server.load import CHAT, PLAIN, STREAM
from tests.server.test_process import serve
from tests.server.test_rolling import Processes, exit_code

FOLDER = Path(__file__).parent / "tls"
CERT, KEY = str(FOLDER / "cert.pem"), str(FOLDER / "key.pem")
OTHER = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgOjbNPMvN4TTpcfhE
InFgbSyeB/jtAwCPl0YgqGQIXUahRANCAAR5u6aC9a8E9swUjilj0kga2ljhv+Vd
5dE66XKj73IMuysEei9EX2ve6TSSRmY9OeC8Z/4yJ2WhxMZZKHq0Q8r1
-----END PRIVATE KEY-----
"""
LOCKED = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAhcdNcT+T9FGgICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEENt5BmNSF0tr246uLULu3+8EgZB1
sLHDOY2wKpUuotqkDlm/zovaNeAbAhzscL9WweMJlwtIZLkA2TFr4YnenG6LwU6Z
N3bKR3xvMUq9LUq5N89vAvRpyndd7FORUaA8LFPdmms4QLP30jjZDDMPbLKrVKFO
nhOIqiAQPkcGdLwX/gOmsI3tRgtxBprvbHmT1qo9O109CT8XIIsOHHMAVQ5Wj+M=
-----END ENCRYPTED PRIVATE KEY-----
"""


class Https:
    """One connection of a client that trusts the tests' certificate."""

    async def open(self, port: int) -> None:
        trust = ssl.create_default_context(cafile=CERT)
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)

    async def ask(self, request: bytes, end: bytes) -> bytes:
        """The answer's bytes up to `end`."""
        self._writer.write(request)
        async with asyncio.timeout(10):
            return await self._reader.readuntil(end)

    async def closed(self) -> None:
        """Returns once the gateway has ended the connection."""
        async with asyncio.timeout(10):
            assert await self._reader.read() == b""
        self._writer.close()
        await self._writer.wait_closed()


async def test_https_from_start_to_end(engine: FakeEngine) -> None:
    async with Processes() as processes:
        options = ("--tls-cert", CERT, "--tls-key", KEY, "--max-body-bytes", "1000")
        gateway = await processes.start("--engine", engine.url, *options)
        assert gateway.url.startswith("https://127.0.0.1:")
        idle, busy, refused = Https(), Https(), Https()
        for client in (idle, busy, refused):
            await client.open(gateway.port)
            answer = await client.ask(post(CHAT, PLAIN), b'"cached_tokens": 32}}}')
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        answer = await refused.ask(post(CHAT, b"x" * 2000), b'"code":"body_too_large"}}')
        assert answer.startswith(b"HTTP/1.1 413 ")
        await refused.closed()
        async with await RawClient.connect(gateway.port) as plain:  # takes nobody down
            await plain.send(get("/health/live"))
            await plain.read_to_end()
        gate = asyncio.Event()
        engine.script(behaviours.gated(gate, behaviours.Stream()))
        streaming = asyncio.create_task(busy.ask(post(CHAT, STREAM), b"data: [DONE]\n\n\r\n0\r\n\r\n"))
        await engine.received(4)
        gateway.process.terminate()
        await idle.closed()
        gate.set()
        assert (await streaming).startswith(b"HTTP/1.1 200 OK\r\n")
        await busy.closed()
        assert await exit_code(gateway) == 0
        assert "Traceback" not in gateway.log


def test_a_file_that_is_not_there_is_said_in_one_line() -> None:
    done = serve("--engine", "http://127.0.0.1:1", "--tls-cert", f"{CERT}.gone", "--tls-key", KEY)
    assert done.returncode == 2
    assert done.stderr == f"kvgate serve: --tls-cert {CERT}.gone cannot be read: No such file or directory\n"


@pytest.mark.parametrize(
    ("cert", "key", "says"),
    [
        (CERT, "", "go together"),
        ("", KEY, "go together"),
        (CERT, f"{KEY}.gone", r"--tls-key .*\.gone cannot be read"),
        (str(FOLDER), KEY, "--tls-cert .* cannot be read: Is a directory"),
        (KEY, KEY, "are not a certificate and its key"),
        (CERT, CERT, "are not a certificate and its key"),
    ],
)
def test_what_is_no_certificate_and_its_key(cert: str, key: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_tls(Settings(tls_cert=cert, tls_key=key))


def test_another_s_key_and_one_with_a_passphrase(tmp_path: Path) -> None:
    other = tmp_path / "key.pem"
    for pem in (OTHER, LOCKED):
        other.write_text(pem)
        with pytest.raises(UsageError, match="are not a certificate and its key"):
            check_tls(Settings(tls_cert=CERT, tls_key=str(other)))
    check_tls(Settings(tls_cert=CERT, tls_key=KEY))
