"""One try of a request at one replica: the place there, and the connection to it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from server.exchange.upstream import AnswerReader, EngineConnection

if TYPE_CHECKING:
    from server.replicas import Replica


class AttemptOwner(AnswerReader, Protocol):
    """Who makes attempts, and reads their answers."""

    def request_sent(self) -> None:
        """The request was written to the engine."""

    def engine_unreachable(self) -> None:
        """There was no connection to be had in time."""


class Attempt:
    """Takes its place at the replica when it is made, and gives it back in `end`, which may be called more than once.

    `reader` gets the engine's answer, and word of how it goes.
    """

    __slots__ = ("_body", "_connection", "_dialing", "_ended", "_head", "_reader", "judged", "replica", "reused")

    def __init__(self, replica: Replica, reader: AttemptOwner, head: bytes, body: bytes) -> None:
        self.replica = replica
        self.reused = False  # on a kept connection, which the engine may have been about to close
        self.judged = False  # whether its replica was told how it went
        self._reader = reader
        self._head, self._body = head, body
        self._connection: EngineConnection | None = None
        self._dialing: asyncio.Task[None] | None = None
        self._ended = False
        replica.inflight += 1

    def start(self, connect_timeout: float) -> None:
        """On a kept connection if there is one."""
        connection = self.replica.pool.take()
        if connection is not None:
            self.reused = True
            self._send(connection)
        else:
            self.dial(connect_timeout)

    def dial(self, connect_timeout: float) -> None:
        """On a new connection."""
        self.reused = False
        self._dialing = asyncio.get_running_loop().create_task(self._connect(connect_timeout))

    async def _connect(self, timeout: float) -> None:  # noqa: ASYNC109  handed on
        try:
            connection = await self.replica.pool.dial(timeout)
        except OSError:
            self._dialing = None
            self._reader.engine_unreachable()
        else:
            self._dialing = None
            self._send(connection)

    def _send(self, connection: EngineConnection) -> None:
        self._connection = connection
        connection.send(self._reader, self._head, self._body)
        self._reader.request_sent()

    def disconnected(self) -> None:
        """The connection is no more this attempt's: back in its pool after a whole answer, or gone."""
        self._connection = None

    def pause(self) -> bool:
        """Reads no more of the answer for now. False if there is nothing to read."""
        if self._connection is None:
            return False
        self._connection.pause()
        return True

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    def end(self) -> None:
        """Gives the place back; what is under way is aborted, and the engine sees it."""
        if self._ended:
            return
        self._ended = True
        self.replica.inflight -= 1
        if self._dialing is not None:
            self._dialing.cancel()
            self._dialing = None
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
