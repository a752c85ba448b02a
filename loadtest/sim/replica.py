"""One simulated engine on a port: vLLM's HTTP surface before it, faults, and restarts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import zmq.asyncio
from aiohttp import web

from kvgate.errors import SetupError
from loadtest.sim.api import Api
from loadtest.sim.asks import Model
from loadtest.sim.engine import Engine, Shape
from loadtest.sim.faults import NONE, Faults, Injector
from loadtest.sim.hangup import reset
from loadtest.sim.publisher import Endpoints, Publisher
from loadtest.sim.tokens import Language

BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class EventPlaces:
    """Where replicas publish KV events: TCP ports counting up from `port`, two for each, or sockets in `folder`."""

    port: int | None = None
    folder: str | None = None

    def of(self, host: str, index: int, port: int) -> Endpoints:
        if self.port is not None:
            first = self.port + 2 * index
            return Endpoints(f"tcp://{host}:{first}", f"tcp://{host}:{first + 1}")
        return Endpoints(f"ipc://{self.folder}/kv-{port}.sock", f"ipc://{self.folder}/replay-{port}.sock")


@dataclass(frozen=True, slots=True)
class SimSettings:
    """What every replica is. port: of the first one; 0 gives each a free one.

    details: whether cached tokens are reported. answer_tokens: mean length of answers that max_tokens does not cut off.
    seed: what shares of faults are drawn from; each replica draws its own.
    """

    shape: Shape
    model: Model
    language: Language
    host: str = "127.0.0.1"
    port: int = 0
    replicas: int = 1
    details: bool = True
    answer_tokens: int = 200
    faults: Faults = NONE
    seed: int = 0
    events: EventPlaces | None = None


class Replica:
    """siblings: all replicas of the fleet, this one among them. failed: gets what ends an engine by accident."""

    def __init__(
        self,
        settings: SimSettings,
        index: int,
        siblings: Sequence[Replica],
        context: zmq.asyncio.Context,
        failed: asyncio.Future[None],
    ) -> None:
        self.settings = settings
        self.index = index
        self.siblings = siblings
        self.port = settings.port and settings.port + index
        self.engine: Engine | None = None  # None while it is down
        self.endpoints: Endpoints | None = None
        loop = asyncio.get_running_loop()
        self.injector = Injector(settings.faults, settings.seed + index, loop.time)
        self._context = context
        self._failed = failed
        self._publisher: Publisher | None = None
        self._stepping: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._runner = web.AppRunner(Api(self).app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        self._site: web.SockSite | None = None

    @property
    def url(self) -> str:
        return f"http://{self.settings.host}:{self.port}"

    @property
    def healthy(self) -> bool:
        return self._site is not None and self._stepping is not None and not self._stepping.done()

    async def start(self) -> None:
        """Raises SetupError where a port is taken."""
        await self._runner.setup()
        await self._up()

    async def stop(self) -> None:
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait([self._restarting])
        await self._down()
        await self._runner.cleanup()

    async def restart(self, down_s: float, keep: asyncio.BaseTransport | None = None) -> None:
        """Lose every connection but `keep` and all state, and come back after down_s seconds; returns when it is down."""
        if self._restarting is not None and not self._restarting.done():
            return  # it is down already
        await self._down(keep)
        self._restarting = asyncio.create_task(self._come_back(down_s))

    async def _come_back(self, down_s: float) -> None:
        await asyncio.sleep(down_s)
        self.injector.restarted()
        try:
            await self._up()
        except SetupError as error:
            self._fail(error)

    async def _up(self) -> None:
        listener = self._listen()
        try:
            await self._open_publisher()
        except BaseException:
            listener.close()
            raise
        publish = self._publisher.publish if self._publisher else None
        self.engine = Engine(self.settings.shape, self.settings.model.name, self.injector, publish)
        self._stepping = asyncio.create_task(self.engine.run())
        self._stepping.add_done_callback(self._stepped)
        site = web.SockSite(self._runner, listener, backlog=BACKLOG)
        await site.start()
        self._site = site

    async def _open_publisher(self) -> None:
        if self.settings.events:
            self.endpoints = self.settings.events.of(self.settings.host, self.index, self.port)
            self._publisher = Publisher(self._context, self.injector.event_lost)
            await self._publisher.open(self.endpoints)

    def _listen(self) -> socket.socket:
        host, port = self.settings.host, self.port
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
        except OSError as error:
            listener.close()
            raise SetupError(
                f"port {port} of {host} cannot be bound: {error.strerror}. Choose another --port"
            ) from error
        self.port = int(listener.getsockname()[1])
        return listener

    async def _down(self, keep: asyncio.BaseTransport | None = None) -> None:
        if self._site is not None:
            await self._site.stop()
            self._site = None
        for connection in list(self._runner.server.connections) if self._runner.server else ():
            if connection.transport is not None and connection.transport is not keep:
                reset(connection.transport)
        self.engine = None
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.wait([self._stepping])
        if self._publisher is not None:
            await self._publisher.close()
            self._publisher = None

    def _stepped(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)
