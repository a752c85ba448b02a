"""For the engine's Python, which has pyzmq: reads KV events and prints one JSON line for each batch.

    python event_reader.py PUBLISH_ENDPOINT REPLAY_ENDPOINT SECONDS

Asks for a replay from the beginning, so that what was published before is there too, then listens. Ends after the first
live batch or SECONDS.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec  # type: ignore[import-not-found]
import zmq  # type: ignore[import-not-found]


def show(kind: str, sequence: bytes, payload: bytes) -> None:
    batch: list[Any] = msgspec.msgpack.decode(payload)
    events = [
        {"type": event["type"], "tokens": len(event.get("token_ids", ())), "block_size": event.get("block_size")}
        for event in batch[1]
    ]
    print(json.dumps({"kind": kind, "sequence": int.from_bytes(sequence, "big"), "events": events}), flush=True)


def main(publish: str, replay: str, seconds: float) -> None:
    context = zmq.Context()
    live = context.socket(zmq.SUB)
    live.setsockopt(zmq.SUBSCRIBE, b"")
    live.connect(publish)
    past = context.socket(zmq.DEALER)
    past.connect(replay)
    past.send_multipart([b"", (0).to_bytes(8, "big")])
    while past.poll(int(seconds * 1000)):
        frames = past.recv_multipart()
        if not frames[-1]:
            break
        show("replayed", frames[-2], frames[-1])
    print(json.dumps({"kind": "listening"}), flush=True)
    if live.poll(int(seconds * 1000)):
        frames = live.recv_multipart()
        show("live", frames[-2], frames[-1])
    context.destroy(linger=0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
