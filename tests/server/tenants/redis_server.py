"""A redis-server of the tests' own, on a Unix socket, that keeps nothing on disk."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from redis import Redis
from redis.exceptions import ConnectionError as Refused


class RedisServer:
    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{folder}/redis.sock"

    def start(self) -> None:
        """Returns once it answers."""
        if self._process is not None:
            return
        argv = [self._program, "--port", "0", "--unixsocket", f"{self._folder}/redis.sock", "--save", ""]
        log = (self._folder / "log").open("ab")
        with log:
            self._process = subprocess.Popen([*argv, "--dir", str(self._folder)], stdout=log, stderr=log)
        deadline = time.monotonic() + 10
        while True:
            try:
                with Redis.from_url(self.url) as client:
                    client.ping()
                return
            except Refused:
                assert self._process.poll() is None, (self._folder / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)
            self._process = None

    def flush(self) -> None:
        """Forgets everything, loaded scripts too."""
        with Redis.from_url(self.url) as client:
            client.flushall()
            client.script_flush()

    def calls(self) -> int:
        """Scripts that it was asked to run so far."""
        with Redis.from_url(self.url) as client:
            stats = client.info("commandstats")
        return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval"))

    def ttl_ms(self, key: str) -> int:
        with Redis.from_url(self.url) as client:
            return int(client.pttl(key))

    def names(self) -> set[str]:
        """Of all keys that it holds."""
        with Redis.from_url(self.url) as client:
            return {key.decode() for key in client.keys("*")}
