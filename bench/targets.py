"""What can be measured: each target is started in front of an upstream, on a core of its own.

A further peer is a subclass with a name and a command; it joins by being listed in TARGETS.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from bench import nginx
from bench.process import LOOPBACK, Child, free_port


class Target(ABC):
    """`folder` is its own, for configuration and log; `core` is where its whole process tree stays."""

    name: ClassVar[str]
    health: ClassVar[str] = "/health"  # answers 200 once requests can be sent

    def __init__(self, folder: Path, core: int) -> None:
        self.folder, self.core = folder, core
        self.port = 0
        self._child: Child | None = None

    @abstractmethod
    def command(self, upstream_port: int) -> list[str]:
        """The command that serves `self.port` in front of the upstream, in the foreground."""

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def start(self, upstream_port: int) -> None:
        """Returns once it is ready. SetupError otherwise."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        command = self.command(upstream_port)
        self._child = Child(self.name, command, self.core, self.folder / "log", self.environment())
        self._child.wait_until_ready(self.port, self.health)

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


class Direct(Target):
    """No gateway: what the load side alone can do, and the time to first token that others add to."""

    name = "direct"

    def command(self, upstream_port: int) -> list[str]:
        raise NotImplementedError("nothing is started")

    def start(self, upstream_port: int) -> None:
        self.port = upstream_port


class Nginx(Target):
    """Debian's nginx with one worker: the least that a proxy costs."""

    name = "nginx"

    def command(self, upstream_port: int) -> list[str]:
        return nginx.command(self.folder, nginx.proxy(self.folder, self.port, f"{LOOPBACK}:{upstream_port}"))


class Kvgate(Target):
    """The gateway with default settings, whatever the caller's environment says."""

    name = "kvgate"
    health = "/health/ready"

    def command(self, upstream_port: int) -> list[str]:
        engine = f"http://{LOOPBACK}:{upstream_port}"
        return [sys.executable, "-m", "kvgate", "serve", "--engine", engine, "--port", str(self.port)]

    def environment(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}


TARGETS: MappingProxyType[str, type[Target]] = MappingProxyType({t.name: t for t in (Direct, Nginx, Kvgate)})
