"""The engines' stand-ins: started on the load core, ready when returned."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench import nginx
from bench.process import Child, fetch, free_port

Start = Callable[[Path, int, int], Child]  # folder, port, core


def answering(folder: Path, port: int, core: int) -> Child:
    """nginx, which answers whole requests at once."""
    command = nginx.command(folder, nginx.upstream(folder, port))
    return Child("the upstream (nginx)", command, core, folder / "log")


def pacing(folder: Path, port: int, core: int) -> Child:
    """The pacer, which streams."""
    command = [sys.executable, "-m", "bench.pacer", str(port)]
    return Child("the upstream (pacer)", command, core, folder / "log")


@contextmanager
def running(start: Start, count: int, folder: Path, core: int) -> Iterator[list[int]]:
    """The ports of `count` upstreams, which are stopped at the end. SetupError if one does not get ready."""
    ports = []
    with ExitStack() as stack:
        for number in range(count):
            own, port = folder / f"upstream-{number}", free_port()
            own.mkdir(parents=True, exist_ok=True)
            child = start(own, port, core)
            stack.callback(child.stop)
            child.wait_until_ready(port, "/health")
            ports.append(port)
        yield ports


def served(port: int) -> int:
    """Requests that an upstream nginx has answered, this one not counted."""
    _, text = fetch(port, "GET", "/stub_status")
    found = re.search(rb"requests\s+\d+ \d+ (\d+)", text)
    if found is None:
        raise ValueError("unreadable stub_status")
    return int(found[1]) - 1
