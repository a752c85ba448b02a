"""`kvgate serve` as a process, the way a user runs it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class GatewayProcess:
    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)  # what it wrote to stderr so far
    _listens: threading.Event = field(default_factory=threading.Event)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self.lines.append(line)
                if match := re.match(r"kvgate listens on (http\S+)", line):
                    self.url = match[1]
                    self._listens.set()
        self._listens.set()

    def wait_until_it_listens(self) -> None:
        assert self._listens.wait(30), self.log
        assert self.url, self.log


@contextlib.contextmanager
def gateway_process(*args: str, **environ: str) -> Iterator[GatewayProcess]:
    """Started on a free port, and stopped at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvgate", "serve", "--port", "0", *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )
    gateway = GatewayProcess(process)
    reader = threading.Thread(target=gateway.read)
    reader.start()
    try:
        gateway.wait_until_it_listens()
        yield gateway
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()
