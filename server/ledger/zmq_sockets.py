"""ZeroMQ sockets in the event loop, without a thread, and how those of an engine's events are set up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TypeAlias

import zmq

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[Socket]"

LIVE_MESSAGES = 4096  # that may wait here; more wait at the engine, or are lost there and replayed
REPLAYED_MESSAGES = 10_000  # as many as an engine keeps by default
LARGEST_MESSAGE = 16 * 1024 * 1024  # bytes
HEARTBEAT = 5.0  # seconds; a peer that is silent for three of them is gone
RETRY = (0.05, 1.0)  # seconds between tries, at first and at most
CONNECT = 3.0  # seconds that one try may take: a host that comes back is not waited for as long as TCP would

CONNECTED = zmq.Event.HANDSHAKE_SUCCEEDED
DISCONNECTED = zmq.Event.DISCONNECTED
CLOSED = zmq.Event.CLOSED  # a try that failed


def live_socket(context: Context) -> Socket:
    """One that hears everything a publisher says, once connected."""
    socket = _prepared(context.socket(zmq.SUB), LIVE_MESSAGES)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    return socket


def replay_socket(context: Context) -> Socket:
    return _prepared(context.socket(zmq.DEALER), REPLAYED_MESSAGES)


def _prepared(socket: Socket, messages: int) -> Socket:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, messages)
    socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
    socket.setsockopt(zmq.IPV6, 1)  # and IPv4
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(HEARTBEAT * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(HEARTBEAT * 3000))
    socket.setsockopt(zmq.CONNECT_TIMEOUT, round(CONNECT * 1000))
    socket.setsockopt(zmq.RECONNECT_IVL, -1)  # one connection for each socket
    return socket


def received(socket: Socket) -> list[bytes] | None:
    """The next message's frames; None where none waits."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


async def readable(sockets: Iterable[Socket], seconds: float | None = None) -> None:
    """Returns when something may wait at one of the sockets, or the time is over. The caller looks what it was."""
    sockets = list(sockets)
    # ZeroMQ's descriptor says only that the socket should be asked, and must not be slept on while it has something
    if any(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN for socket in sockets):
        return
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    descriptors = [socket.fileno() for socket in sockets]
    timer = None if seconds is None else loop.call_later(max(0.0, seconds), wake)
    for descriptor in descriptors:
        loop.add_reader(descriptor, wake)
    try:
        await woken
    finally:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
        if timer is not None:
            timer.cancel()
