"""For the engine's Python, which has pyzmq: prints the token ids of every block stored so far, as one JSON list of lists.

python token_reader.py REPLAY_ENDPOINT
"""

from __future__ import annotations

import json
import sys

import msgspec  # type: ignore[import-not-found]
import zmq  # type: ignore[import-not-found]


def main(replay: str) -> None:
    context = zmq.Context()
    past = context.socket(zmq.DEALER)
    past.connect(replay)
    past.send_multipart([b"", (0).to_bytes(8, "big")])
    blocks = []
    while past.poll(10_000):
        frames = past.recv_multipart()
        if not frames[-1]:
            break
        for event in msgspec.msgpack.decode(frames[-1])[1]:
            ids, size = event.get("token_ids", ()), event.get("block_size", 1)
            blocks += [ids[at : at + size] for at in range(0, len(ids), size)]
    print(json.dumps(blocks))
    context.destroy(linger=0)


if __name__ == "__main__":
    main(sys.argv[1])
