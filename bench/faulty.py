"""An upstream with faults on request: the pacer, but a prompt can ask for a 500 or for a stream that is cut.

Run as `python -m bench.faulty PORT`.
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

from bench import payloads
from bench.pacer import CHAT, STREAMED, Engine, Wheel, chunked_stream
from bench.process import LOOPBACK

INNOCENT, FAIL, CUT = "Please answer.", "Please fail.", "Please break off."
COUNT = "/count"
ERROR = b'{"error":{"message":"asked for","type":"InternalServerError","code":500}}'


def request(prompt: str, stream: bool = False) -> bytes:
    """A chat request for this upstream."""
    return json.dumps(
        {"model": payloads.MODEL, "stream": stream, "messages": [{"role": "user", "content": prompt}]}
    ).encode()


class Faulty(Engine):
    """One connection. Chat requests of all connections are counted, and GET /count tells."""

    chats = 0

    def answer(self, start: bytes, body: bytes) -> None:
        if start.startswith(f"GET {COUNT} ".encode()):
            self._reply(b"200 OK", str(Faulty.chats).encode())
            return
        if start.startswith(CHAT):
            Faulty.chats += 1
            if FAIL.encode() in body:
                self._reply(b"500 Internal Server Error", ERROR)
                return
            if CUT.encode() in body and STREAMED.search(body):
                self.transport.write(b"".join(self._chunks[:3]))
                self.transport.close()
                return
        super().answer(start, body)

    def _reply(self, status: bytes, body: bytes) -> None:
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        self.transport.write(head + body)


async def serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    wheel, chunks = Wheel(loop, payloads.STREAM_PERIOD_MS), chunked_stream()
    server = await loop.create_server(lambda: Faulty(wheel, chunks), LOOPBACK, port, backlog=1024)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
