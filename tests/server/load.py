"""Clients that ask without a pause, and what became of each request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.fakes.raw_client import RawClient, Response, post
from tests.server.running import RunningGateway

CHAT = "/v1/chat/completions"
PLAIN = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'
STREAM = b'{"model":"tiny","stream":true,"messages":[{"role":"user","content":"hi"}]}'


async def ask(gateway: RunningGateway, body: bytes = PLAIN) -> Response:
    async with await RawClient.connect(gateway.port) as client:
        await client.send(post(CHAT, body))
        return await client.read_response()


@dataclass
class Load:
    """Counts as it goes. `failed` are answers other than 200 and answers that came short."""

    answered: int = 0
    failed: list[Response] = field(default_factory=list)
    stopping: bool = False

    async def client(self, gateway: RunningGateway, body: bytes) -> None:
        async with await RawClient.connect(gateway.port) as client:
            while not self.stopping:
                await client.send(post(CHAT, body))
                answer = await client.read_response()
                self.answered += 1
                if answer.status != 200 or not answer.complete:
                    self.failed.append(answer)
                    if not answer.complete:
                        return

    async def more(self, count: int) -> None:
        """Returns after so many further answers."""
        goal = self.answered + count
        async with asyncio.timeout(20):
            while self.answered < goal:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def load(gateway: RunningGateway, clients: int = 8) -> AsyncIterator[Load]:
    """Half of the clients ask for streams."""
    state = Load()
    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(state.client(gateway, STREAM if number % 2 else PLAIN))
        try:
            yield state
        finally:
            state.stopping = True
