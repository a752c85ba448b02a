"""A publisher of KV events as vLLM's: real ZeroMQ sockets, numbered batches, and a replay of the last ones. It can be told to
lose things."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from server.ledger.zmq_sockets import Context, Socket, readable

FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
        "locality",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}

Event = dict[str, Any]
BLOCK = 4  # tokens


def name_of(tokens: Sequence[int], salt: str | None = None) -> int:
    """A block's hash, which is its prefix's."""
    return hash((salt, tuple(tokens))) & (2**64 - 1)


def stored(tokens: Sequence[int], first: int = 0, *, salt: str | None = None, **more: Any) -> Event:
    """The full blocks of a prompt from number `first` on."""
    hashes = [name_of(tokens[: n * BLOCK], salt) for n in range(1, len(tokens) // BLOCK + 1)]
    event: Event = {
        "type": "BlockStored",
        "block_hashes": hashes[first:],
        "parent_block_hash": hashes[first - 1] if first else None,
        "token_ids": list(tokens[first * BLOCK : len(hashes) * BLOCK]),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    if salt is not None and first == 0:
        event["extra_keys"] = [[salt], *[None] * (len(hashes) - 1)]
    return event | more


def removed(tokens: Sequence[int], *numbers: int, salt: str | None = None, **more: Any) -> Event:
    """The blocks of a prompt with these numbers."""
    hashes = [name_of(tokens[: (n + 1) * BLOCK], salt) for n in numbers]
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"} | more


CLEARED: Event = {"type": "AllBlocksCleared"}


def as_array(event: Event) -> list[Any]:
    """The form of older versions: positional, trailing fields that are not set left out."""
    values = [event.get(name) for name in FIELDS[event["type"]]]
    while values and values[-1] is None:
        values.pop()
    return [event["type"], *values]


def batch(*events: Any, at: float = 1.0, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([at, list(events)] if rank is None else [at, list(events), rank])


class Publisher:
    """`replaying`: whether it answers. `topics`: False replays without the topic's frame, as older versions. `kept`: batches."""

    def __init__(self, folder: Path, name: str = "kv", *, kept: int = 10_000, tcp: bool = False) -> None:
        self.replaying = True
        self.topics = True
        self.holes: set[int] = set()  # numbers that the next replay loses on its way, once each
        self.asked: list[int] = []  # from where replays were asked for
        self.number = 0
        self.at = 0.0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._context: Context = zmq.Context()
        self._live: Socket | None = None
        self._folder, self._name = folder, name
        self.address = f"ipc://{folder}/{name}.sock"
        self.replay_address = f"ipc://{folder}/{name}-replay.sock"
        if tcp:
            self.address = self.replay_address = "tcp://127.0.0.1:*"
        self._stop, self._stopped = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._stop.bind("inproc://stop")
        self._stopped.connect("inproc://stop")
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.replay_address)
        self.replay_address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.open()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    # -- the live socket

    def open(self) -> None:
        self._live = self._context.socket(zmq.XPUB)  # a PUB that hears who subscribes
        self._live.setsockopt(zmq.LINGER, 0)
        self._live.bind(self.address)
        self.address = self._live.getsockopt_string(zmq.LAST_ENDPOINT)

    def shut(self) -> None:
        """As if the network or the process were gone. The address is free afterwards."""
        assert self._live is not None
        monitor = self._live.get_monitor_socket(zmq.Event.CLOSED)
        self._live.unbind(self.address)
        assert monitor.poll(10_000), "the listener does not end"
        self._live.disable_monitor()
        monitor.close(0)
        self._live.close(0)
        self._live = None

    async def joined(self, seconds: float = 10.0) -> None:
        """Returns when a subscriber hears what is published from now on."""
        assert self._live is not None
        async with asyncio.timeout(seconds):
            while not self._live.poll(0):
                await readable((self._live,))
        self._live.recv()

    def publish(self, *events: Any, arrays: bool = False, rank: int | None = 0) -> None:
        self.at += 1.0
        self.send(batch(*(as_array(event) if arrays else event for event in events), at=self.at, rank=rank))

    def send(self, payload: bytes) -> None:
        self.keep(payload)
        assert self._live is not None
        self._live.send_multipart([b"kv-events", (self.number - 1).to_bytes(8, "big"), payload])

    def send_frames(self, *frames: bytes) -> None:
        assert self._live is not None
        self._live.send_multipart(frames)

    def again(self, number: int) -> None:
        """A kept batch once more."""
        payload = next(payload for known, payload in self._kept if known == number)
        self.send_frames(b"", number.to_bytes(8, "big"), payload)

    def lose(self, *events: Any) -> None:
        """A batch that is kept, but does not reach the subscribers."""
        self.at += 1.0
        self.keep(batch(*events, at=self.at))

    def keep(self, payload: bytes) -> None:
        self._kept.append((self.number, payload))
        self.number += 1

    def forget(self) -> None:
        """Keep nothing of what was published."""
        self._kept.clear()

    def restart(self) -> None:
        """Another process at the same addresses."""
        self._kept.clear()
        self.number = 0

    # -- replays

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stopped in ready:
                return
            client, _, start = self._router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            if self.replaying:
                self._replay(client, self.asked[-1])

    def _replay(self, client: bytes, start: int) -> None:
        topic = [b"kv-events"] if self.topics else []
        sent = 0
        for number, payload in list(self._kept):
            if number < start:
                continue
            if number in self.holes and sent:  # an empty queue takes the first one
                self.holes.discard(number)
                continue
            sent += 1
            self._router.send_multipart([client, b"", *topic, number.to_bytes(8, "big"), payload])
        self._router.send_multipart([client, b"", *([b""] if self.topics else []), b"\xff" * 8, b""])

    def close(self) -> None:
        self._stop.send(b"")
        self._thread.join()
        for socket in (self._stop, self._stopped, self._router, self._live):
            if socket is not None:
                socket.close(0)
        self._context.term()
