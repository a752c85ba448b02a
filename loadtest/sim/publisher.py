"""Publishes KV events over ZMQ as vLLM does, and replays them.

PUB: (topic, sequence number as 8 bytes big-endian, payload). ROUTER: asked with (empty, first sequence number), it answers
(empty, topic, number, payload) for each batch it still has, then (empty, empty, -1, empty).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio

from kvgate.errors import SetupError
from loadtest.sim.blocks import Event
from loadtest.sim.events import KVEventBatch, to_wire

BUFFER_STEPS = 10_000
HWM = 100_000
END = (-1).to_bytes(8, "big", signed=True)
BIND_TRIES = 100  # ZMQ lets go of an address in a thread of its own, some milliseconds after a socket is closed
BIND_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where events are published and replayed, as ZMQ writes addresses."""

    publish: str
    replay: str

    def source(self) -> dict[str, object]:
        """What vLLM's /kv_event_sources says of it."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.publish,
            "replay_endpoint": self.replay,
            "buffer_steps": BUFFER_STEPS,
            "hwm": HWM,
            "max_queue_size": HWM,
            "topic": "",
        }


class Publisher:
    """Numbers batches from 0. lost(): whether this frame is not sent; it is still numbered and can be replayed."""

    def __init__(self, context: zmq.asyncio.Context, lost: Callable[[], bool]) -> None:
        self._lost = lost
        self._encode = msgspec.msgpack.Encoder().encode
        self._sequence = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=BUFFER_STEPS)
        self._live: zmq.Socket[bytes] = zmq.Context(context).socket(zmq.PUB)
        self._replay = context.socket(zmq.ROUTER)
        self._live.set_hwm(HWM)
        self._replay.set_hwm(HWM)
        self._task: asyncio.Task[None] | None = None

    async def open(self, endpoints: Endpoints) -> None:
        """Raises SetupError where an address is taken."""
        try:
            await _bind(self._live, endpoints.publish)
            await _bind(self._replay, endpoints.replay)
        except SetupError:
            await self.close()
            raise
        self._task = asyncio.create_task(self._serve_replay())

    def publish(self, events: Sequence[Event]) -> None:
        payload = self._encode(KVEventBatch(time.time(), [to_wire(event) for event in events], 0))
        number = self._sequence
        self._sequence += 1
        self._buffer.append((number, payload))
        if not self._lost():
            # a PUB socket never waits: where a subscriber is too slow it drops, as vLLM's does
            self._live.send_multipart((b"", number.to_bytes(8, "big"), payload), zmq.NOBLOCK)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._live.close(linger=0)
        self._replay.close(linger=0)

    async def _serve_replay(self) -> None:
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3:
                continue  # vLLM answers nothing either
            client, _, start = frames
            first = int.from_bytes(start, "big")
            for number, payload in list(self._buffer):
                if number >= first:
                    await self._replay.send_multipart((client, b"", b"", number.to_bytes(8, "big"), payload))
            await self._replay.send_multipart((client, b"", b"", END, b""))


async def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, address: str) -> None:
    for left in reversed(range(BIND_TRIES)):
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or not left:
                raise SetupError(f"KV events cannot be published at {address}: {error}") from error
            await asyncio.sleep(BIND_PAUSE_S)
        else:
            return
