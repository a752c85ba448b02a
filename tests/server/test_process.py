"""`kvgate serve` from the outside: start, signals, what it logs, what it refuses to start with."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys

import pytest

from tests.fakes import behaviours
from tests.fakes.engine import FakeEngine
from tests.fakes.raw_client import RawClient, get, post
from tests.server.exchange.test_faults import CHAT, PLAIN
from tests.server.process import gateway_process


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_running_requests_finish(engine: FakeEngine, sent: signal.Signals) -> None:
    gate = asyncio.Event()
    with await asyncio.to_thread(contextlib.ExitStack) as stack:
        gateway = await asyncio.to_thread(lambda: stack.enter_context(gateway_process("--engine", engine.url)))
        engine.script(behaviours.gated(gate))
        async with await RawClient.connect(gateway.port) as busy, await RawClient.connect(gateway.port) as idle:
            await idle.send(get("/health/live"))
            assert (await idle.read_response(method="GET")).status == 200
            await busy.send(post(CHAT, PLAIN))
            await engine.received(1)
            gateway.process.send_signal(sent)
            assert await idle.read_to_end() == b""  # a connection without a request is closed
            with pytest.raises(ConnectionRefusedError):
                await RawClient.connect(gateway.port)
            gate.set()
            assert (await busy.read_response()).status == 200
            assert await asyncio.to_thread(gateway.process.wait, 10) == 0


async def test_nothing_that_a_user_typed_is_logged(engine: FakeEngine) -> None:
    with contextlib.ExitStack() as stack:
        start = gateway_process("--engine", engine.url, "--log-level", "debug")
        gateway = await asyncio.to_thread(stack.enter_context, start)
        engine.script(behaviours.Whole(), behaviours.garbage(), behaviours.reset())
        for body in (PLAIN, PLAIN, PLAIN, b'{"model":"secret-model","messages":[]}', b'{"secret', b'"secret"'):
            async with await RawClient.connect(gateway.port) as client:
                key = [("authorization", "Bearer secret-key"), ("x-secret", "secret")]
                await client.send(post(f"{CHAT}?api_key=secret", body, key))
                await client.read_response()
        async with await RawClient.connect(gateway.port) as client:
            await client.send(b"GET /secret secret HTTP/1.1\r\nsecret\r\n\r\n")
            await client.read_response()
        async with await RawClient.connect(gateway.port) as client:
            await client.send(get("/secret?key=secret"))
            await client.read_response()
        gateway.process.terminate()
        assert await asyncio.to_thread(gateway.process.wait, 10) == 0
    assert "serves tiny" in gateway.log
    assert "secret" not in gateway.log


def serve(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvgate", "serve", *args], capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "--engine is missing"),
        (["--engine", "localhost:8001"], "is not a URL like http://127.0.0.1:8001"),
        (["--engine", "http://127.0.0.1:1/v1"], "scheme, host and port only"),
        (["--engine", "http://127.0.0.1:99999"], "Port out of range"),
        (["--engine", "http://127.0.0.1:1", "--engine", "http://127.0.0.1:1/"], "the same engine twice"),
        (["--engine", "http://127.0.0.1:1", "--policy", "best"], "--policy 'best' is not one of"),
        (["--engine", "http://127.0.0.1:1", "--log-level", "loud"], "--log-level 'loud' is not one of"),
        (["--engine", "http://127.0.0.1:1", "--host", "0.0.0.0"], "--insecure-no-auth"),
    ],
)
def test_a_wrong_call_is_refused_in_one_line(args: list[str], says: str) -> None:
    done = serve(*args)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.startswith("kvgate serve: ")
    assert done.stderr.count("\n") == 1


def test_a_taken_port_is_said_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = serve("--engine", "http://127.0.0.1:1", "--port", str(port))
    assert done.returncode == 2
    assert f"127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
