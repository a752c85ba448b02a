"""What can be measured: each target is started in front of upstreams, on a core of its own. Further ones are in peers.py."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from bench import nginx, payloads
from bench.process import LOOPBACK, Child, free_port


class Target(ABC):
    """`folder` is its own, for configuration and log; `core` is where its whole process tree stays."""

    name: str
    health: ClassVar[str] = "/health"  # answers 200 once requests can be sent
    start_seconds: ClassVar[float] = 30.0
    attempts: ClassVar[int] = 3  # of a round in which streams do not keep their pace
    optional: ClassVar[bool] = False  # the run goes on without it if it does not start
    exact: ClassVar[bool] = True  # passes answers on byte for byte
    once: bool = True  # reaches one upstream with one request for each of the client's

    def __init__(self, folder: Path, core: int) -> None:
        self.folder, self.core = folder, core
        self.port = 0
        self._child: Child | None = None

    @abstractmethod
    def command(self, upstreams: Sequence[int]) -> list[str]:
        """The command that serves `self.port` in front of the upstreams' ports, in the foreground."""

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def start(self, upstreams: Sequence[int]) -> None:
        """Returns once it is ready. SetupError otherwise."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        command = self.command(upstreams)
        self._child = Child(self.name, command, self.core, self.folder / "log", self.environment())
        self._child.wait_until_ready(self.port, self.health, self.start_seconds)

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None

    @property
    def pid(self) -> int | None:
        """The root of its process tree; None where nothing stands between load and upstream."""
        return self._child.pid if self._child else None

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"


def engine_urls(upstreams: Sequence[int]) -> list[str]:
    return [f"http://{LOOPBACK}:{port}" for port in upstreams]


class Direct(Target):
    """No gateway: what the load side alone can do with one upstream, and the time to first token that others add to."""

    name = "direct"

    def command(self, upstreams: Sequence[int]) -> list[str]:
        return []  # nothing stands between load and upstream

    def start(self, upstreams: Sequence[int]) -> None:
        self.port = upstreams[0]


class Nginx(Target):
    """Debian's nginx with one worker: the least that a proxy costs."""

    name = "nginx"

    def command(self, upstreams: Sequence[int]) -> list[str]:
        return nginx.command(self.folder, nginx.proxy(self.folder, self.port, upstreams))


class Kvgate(Target):
    """The gateway with default settings, whatever the caller's environment says; `policy` where one is named."""

    health = "/health/ready"

    def __init__(self, folder: Path, core: int, policy: str | None = None) -> None:
        super().__init__(folder, core)
        self.name = f"kvgate/{policy}" if policy else "kvgate"
        self._policy = policy

    def command(self, upstreams: Sequence[int]) -> list[str]:
        engines = [argument for url in engine_urls(upstreams) for argument in ("--engine", url)]
        return [sys.executable, "-m", "kvgate", "serve", *engines, "--port", str(self.port), *self.options()]

    def options(self) -> list[str]:
        """Beside the peers, with a policy, everything is on: a key for each request, limits on all counts (none is reached)."""
        if self._policy is None:
            return []
        much = 1_000_000_000
        lines: list[dict[str, str | int]] = [
            {
                "id": "bench",
                "tenant": "bench",
                "sha256": hashlib.sha256(payloads.KEY.encode()).hexdigest(),
                "created": "2030-01-01T00:00:00Z",
            },
            {
                "tenant": "bench",
                "requests_per_minute": much,
                "input_tokens_per_minute": much,
                "output_tokens_per_minute": much,
                "concurrency": 100_000,
            },
        ]
        keys = self.folder / "keys"
        keys.write_text("".join(json.dumps(line) + "\n" for line in lines))
        keys.chmod(0o600)
        return ["--policy", self._policy, "--key-file", str(keys)]

    def environment(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}


Launch = Callable[[Path, int], Target]  # folder, core
