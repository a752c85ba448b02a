"""FakeEngine: a scripted vLLM on a real loopback socket, for what a real one cannot be made to do.

    async with FakeEngine() as engine:
        engine.script(behaviours.status(503), behaviours.reset())   # the next two POSTs; then the default again
        ...                                                         # speak to engine.url
        assert engine.posts[0].body == sent

Everything received is kept as bytes in `engine.requests`. A behaviour is any `async (request, writer) -> None`; the
ready-made ones are in tests.fakes.behaviours. A behaviour whose peer leaves is cancelled, and its request is `aborted`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Self

from tests.fakes import answers
from tests.fakes.connection import Connection, Received, Writer
from tests.fakes.ports import LOOPBACK, refused_port, silent_port

__all__ = ["Behaviour", "FakeEngine", "Received", "Writer", "refused_port", "silent_port"]

Behaviour = Callable[[Received, Writer], Awaitable[None]]


@dataclass(eq=False)
class FakeEngine:
    """`port` 0 takes a free one, kept over stop() and start(). Token counts are what usage reports by default."""

    model: str = "tiny"
    max_model_len: int = 4096
    prompt_tokens: int = 64
    cached_tokens: int = 32
    port: int = 0
    gauges: dict[str, float] = field(default_factory=dict)  # metric name without labels -> value, over the defaults
    requests: list[Received] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)  # what behaviours raised; leaving the context raises it
    opened: int = 0  # connections ever accepted

    def __post_init__(self) -> None:
        self._queue: deque[Behaviour] = deque()
        self._always: Behaviour | None = None
        self._gets: dict[str, Behaviour] = {}
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._changed = asyncio.Event()

    # scripting

    def script(self, *behaviours: Behaviour) -> None:
        """Queues one behaviour for each of the next POSTs, in order of arrival."""
        self._queue.extend(behaviours)

    def always(self, behaviour: Behaviour | None) -> None:
        """The behaviour of every POST that has none queued; None brings the default back."""
        self._always = behaviour

    def on_get(self, path: str, behaviour: Behaviour | None) -> None:
        """Replaces the answer to GET `path`; None brings the default back."""
        if behaviour is None:
            self._gets.pop(path, None)
        else:
            self._gets[path] = behaviour

    # observing

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def posts(self) -> list[Received]:
        return [r for r in self.requests if r.method == "POST"]

    @property
    def running(self) -> int:
        """POSTs that are being answered."""
        return sum(1 for r in self.posts if r.open)

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    async def wait_for(self, condition: Callable[[], bool], timeout: float = 5.0) -> None:  # noqa: ASYNC109
        """Returns once `condition()` holds; looked at whenever the engine receives, finishes or loses something."""
        async with asyncio.timeout(timeout):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def received(self, posts: int, timeout: float = 5.0) -> Received:  # noqa: ASYNC109
        """The `posts`-th POST, once it has come."""
        await self.wait_for(lambda: len(self.posts) >= posts, timeout)
        return self.posts[posts - 1]

    # life

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), LOOPBACK, self.port, backlog=512)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As if the process died: no more listening, every connection gone. start() brings it back on the same port."""
        if self._server is None:
            return
        self._server.close()
        for _ in range(3):  # a connection may be accepted and not be ours yet: asyncio makes it a few turns later
            await asyncio.sleep(0)
        for connection in list(self._connections):
            connection.drop()
        await self.wait_for(lambda: not self._connections)
        await self._server.wait_closed()
        self._server = None

    async def drop_idle(self) -> None:
        """Closes the kept-alive connections that have no request open, as an engine's keep-alive time-out does."""
        for connection in [c for c in self._connections if c.idle]:
            connection.drop()
        await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()
        if self.failures:
            raise self.failures[0]

    # what Connection calls

    def connected(self, connection: Connection) -> int:
        self._connections.add(connection)
        self.opened += 1
        self.changed()
        return self.opened

    def disconnected(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self.changed()

    def changed(self) -> None:
        self._changed.set()

    def behaviour_for(self, method: str, path: str) -> Behaviour:
        """Takes the next behaviour off the script. Called once for each request, when its head is complete."""
        path = path.partition("?")[0]
        if method == "POST":
            if self._queue:
                return self._queue.popleft()
            return self._always or answers.completion(self)
        if method == "GET" and path in self._gets:
            return self._gets[path]
        return answers.plain(self, method, path)
