"""Loopback ports that do not answer, each in its own way."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

LOOPBACK = "127.0.0.1"


@contextmanager
def refused_port() -> Iterator[int]:
    """A port that refuses connections. It is held bound, so that nobody else can begin to listen on it meanwhile."""
    with socket.socket() as sock:
        sock.bind((LOOPBACK, 0))
        yield int(sock.getsockname()[1])


@contextmanager
def silent_port() -> Iterator[int]:
    """A port where a connect neither succeeds nor fails: it listens, never accepts, and its backlog is full.

    Linux drops the SYN then. Where a system answers it with a reset instead, this is a refused port.
    """
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((LOOPBACK, 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield int(listener.getsockname()[1])
