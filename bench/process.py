"""Child processes that are started on a core, awaited, and ended by their process group; and free ports."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from bench.cpu import pinned
from kvgate.errors import SetupError

LOOPBACK = "127.0.0.1"
ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((LOOPBACK, 0))
        return int(sock.getsockname()[1])


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that are free now."""
    while True:
        first = free_port()
        with ExitStack() as taken:
            try:
                for port in range(first, first + count):
                    taken.enter_context(socket.socket()).bind((LOOPBACK, port))
            except (OSError, OverflowError):
                continue
            return first


def fetch(
    port: int, method: str, path: str, body: bytes = b"", timeout: float = 5.0, key: str | None = None
) -> tuple[int, bytes]:
    """Status and body of one request over a connection of its own. Raises OSError or HTTPException."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=timeout)
    try:
        headers = {"content-type": "application/json"} if body else {}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        connection.request(method, path, body or None, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


class Child:
    """One process on one core, in a group of its own. Its output goes to `log`."""

    def __init__(
        self, name: str, command: list[str], core: int, log: Path, environment: dict[str, str] | None = None
    ) -> None:
        self.name, self.log = name, log
        with log.open("wb") as out, pinned(core):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, port: int, path: str, seconds: float = 30.0) -> None:
        """Returns once GET `path` answers 200; SetupError with the end of the log if it dies or takes too long."""
        deadline = time.monotonic() + seconds
        state = "does not answer"
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise SetupError(f"{self.name} ended with exit code {self._process.returncode}.\n{self.tail()}")
            try:
                status, _ = fetch(port, "GET", path, timeout=1.0)
            except (OSError, http.client.HTTPException) as error:
                state = f"does not answer ({type(error).__name__})"
            else:
                if status == 200:
                    return
                state = f"answers {status}"
            time.sleep(0.05)
        raise SetupError(f"{self.name} {state} at {path} after {seconds:g} s.\n{self.tail()}")

    def tail(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, seconds: float = 5.0) -> None:
        """SIGTERM, then SIGKILL to the whole group. Safe to call twice."""
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):  # the group is killed next
                self._process.wait(seconds)
        with suppress(ProcessLookupError):  # nobody is left in it
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
