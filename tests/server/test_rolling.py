"""The gateway goes down and comes back under load: whoever asks is answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from tests.fakes import behaviours, wire
from tests.fakes.behaviours import Stream
from tests.fakes.engine import FakeEngine
from tests.fakes.raw_client import RawClient, Response, get, post
from tests.server.exchange.test_dialects import MESSAGES, minimal
from tests.server.load import CHAT, PLAIN, STREAM
from tests.server.process import GatewayProcess, gateway_process

POLL_SECONDS = 0.05


class Processes(contextlib.AsyncExitStack):
    """Gateways as processes; those that still run are stopped at the end, off the loop that their engine runs in."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[GatewayProcess] = []

    async def start(self, *args: str) -> GatewayProcess:
        process = gateway_process(*args)
        gateway = await asyncio.to_thread(process.__enter__)
        self.push_async_callback(asyncio.to_thread, process.__exit__, None, None, None)
        self.started.append(gateway)
        return gateway


async def exit_code(gateway: GatewayProcess) -> int:
    return await asyncio.to_thread(gateway.process.wait, 20)


async def refuses(port: int) -> None:
    """Returns once nobody listens there any more."""
    async with asyncio.timeout(10):
        while True:
            try:
                (await RawClient.connect(port)).close()
            except ConnectionRefusedError:
                return
            await asyncio.sleep(0.01)


async def answer_to(client: RawClient, request: bytes) -> Response:
    await client.send(request)
    return await client.read_response(10.0, method=request.partition(b" ")[0].decode())


@dataclass
class Service:
    """Gateways behind one name. `ready` are the ports that a load balancer would send new connections to."""

    ports: list[int]
    ready: list[int] = field(default_factory=list)
    served: dict[int, int] = field(default_factory=dict)  # answers by port
    lost: list[str] = field(default_factory=list)
    told: int = 0  # answers that said `connection: close`
    turn: int = 0
    stopping: bool = False

    async def watch(self) -> None:
        """As a load balancer does: by its own requests, from time to time."""
        while not self.stopping:
            self.ready = [port for port in self.ports if await self._is_ready(port)]
            await asyncio.sleep(POLL_SECONDS)

    async def _is_ready(self, port: int) -> bool:
        try:
            async with await RawClient.connect(port) as client:
                return (await answer_to(client, get("/health/ready"))).status == 200
        except (EOFError, OSError):
            return False

    async def client(self, body: bytes, keeps: bool) -> None:
        """Asks without a pause; with `keeps` on one connection as long as it may, else each time on a new one."""
        while not self.stopping:
            self.turn += 1
            port = self.ready[self.turn % len(self.ready)]
            try:
                client = await RawClient.connect(port)
            except OSError as error:
                self.lost.append(f"{port}: no connection: {error!r}")
                return
            async with client:
                if not await self._use(client, port, body, keeps):
                    return

    async def _use(self, client: RawClient, port: int, body: bytes, keeps: bool) -> bool:
        """Until the connection ends; False where a request was lost."""
        while not self.stopping:
            try:
                answer = await answer_to(client, post(CHAT, body))
            except (EOFError, OSError) as error:
                self.lost.append(f"{port}: no answer: {error!r}")
                return False
            if answer.status != 200 or not answer.complete:
                self.lost.append(f"{port}: {answer.raw!r}")
                return False
            self.served[port] = self.served.get(port, 0) + 1
            if answer.header("connection") == "close":
                self.told += 1
                return True
            if not keeps:
                return True
        return True

    async def answers(self, port: int, count: int) -> None:
        """Returns after so many further answers from there."""
        goal = self.served.get(port, 0) + count
        async with asyncio.timeout(20):
            while self.served.get(port, 0) < goal and not self.lost:
                await asyncio.sleep(0.01)

    async def is_ready(self, port: int) -> None:
        async with asyncio.timeout(20):
            while port not in self.ready:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def asked(service: Service, clients: int) -> AsyncIterator[None]:
    """Half of the clients ask for streams, and half keep their connections."""
    async with asyncio.TaskGroup() as group:
        group.create_task(service.watch())
        for port in service.ports:
            await service.is_ready(port)
        for number in range(clients):
            group.create_task(service.client(STREAM if number % 2 else PLAIN, keeps=number % 4 < 2))
        try:
            yield
        finally:
            service.stopping = True


async def test_a_rolling_restart_loses_no_request(engine: FakeEngine) -> None:
    async def answer(request: behaviours.Received, writer: behaviours.Writer) -> None:
        streams = json.loads(request.body).get("stream")
        await (Stream(["w"] * 20, pause=0.01) if streams else behaviours.Whole())(request, writer)

    engine.always(answer)
    options = ("--engine", engine.url, "--drain-delay", "1", "--health-interval", "0.1")
    async with Processes() as processes:
        gateways = await asyncio.gather(*(processes.start(*options) for _ in range(2)))
        service = Service([gateway.port for gateway in gateways])
        async with asked(service, clients=8):
            for gateway in gateways:
                await service.answers(gateway.port, 20)
                gateway.process.terminate()
                assert await exit_code(gateway) == 0
                again = await processes.start(*options, "--port", str(gateway.port))
                await service.is_ready(again.port)
            await service.answers(service.ports[0], 20)
        for gateway in processes.started:  # all at once, and their delays with the second signal, which follows
            gateway.process.terminate()
        assert service.lost == []
        assert service.told >= 4  # all who keep their connections
        assert engine.running == 0


async def test_a_restart_without_a_delay_answers_all_who_are_connected(engine: FakeEngine) -> None:
    gate = asyncio.Event()

    async def two_halves(request: behaviours.Received, writer: behaviours.Writer) -> None:
        events = Stream().events(request)
        await writer.send(wire.head(200, [behaviours.EVENT_STREAM, ("transfer-encoding", "chunked")]))
        await writer.send(wire.chunk(b"".join(events[:2])))
        await gate.wait()
        await writer.send(wire.chunk(b"".join(events[2:])) + wire.LAST_CHUNK)

    engine.script(behaviours.gated(gate), behaviours.gated(gate, Stream()), two_halves)
    async with Processes() as processes, contextlib.AsyncExitStack() as stack:
        gateway = await processes.start("--engine", engine.url)
        busy, stream, begun, sending, other, used, unused = [
            await stack.enter_async_context(await RawClient.connect(gateway.port)) for _ in range(7)
        ]
        for number, (client, body) in enumerate(((busy, PLAIN), (stream, STREAM), (begun, STREAM)), 1):
            await client.send(post(CHAT, body))
            await engine.received(number)
        assert b"connection: close" not in await begun.read_until(b"\r\n\r\n")
        for client in (used, other):
            assert (await answer_to(client, get("/health/live"))).header("connection") is None
        request = post(CHAT, PLAIN)
        await sending.send(request[:-9])
        gateway.process.terminate()
        await refuses(gateway.port)

        for client in (used, unused):  # as if it had been under way when the gateway was told to end
            answer = await answer_to(client, post(CHAT, PLAIN))
            assert (answer.status, answer.header("connection")) == (200, "close")
        answer = await answer_to(other, get("/v1/models"))
        assert (answer.status, answer.header("connection")) == (200, "close")
        await sending.send(request[-9:])
        answer = await sending.read_response()
        assert (answer.status, answer.header("connection")) == (200, "close")
        gate.set()
        for client in (busy, stream):
            answer = await client.read_response()
            assert (answer.status, answer.complete, answer.header("connection")) == (200, True, "close")
        await begun.read_until(b"\r\n0\r\n\r\n")
        answer = await answer_to(begun, post(CHAT, PLAIN))  # the answer before it could not say that it was the last
        assert (answer.status, answer.header("connection")) == (200, "close")
        for client in (busy, stream, begun, sending, other, used, unused):
            assert await client.read_to_end() == b""
            assert client.end == "eof"
        assert await exit_code(gateway) == 0


async def test_for_its_delay_a_gateway_that_goes_is_not_ready_and_serves(engine: FakeEngine) -> None:
    async with Processes() as processes:
        gateway = await processes.start("--engine", engine.url, "--drain-delay", "3600", "--health-interval", "0.1")
        async with await RawClient.connect(gateway.port) as kept:
            assert (await answer_to(kept, post(CHAT, PLAIN))).header("connection") is None
            gateway.process.terminate()
            async with asyncio.timeout(10):
                while True:
                    async with await RawClient.connect(gateway.port) as new:
                        ready = await answer_to(new, get("/health/ready"))
                    if ready.status == 503:
                        break
            assert json.loads(ready.body)["status"] == "draining"
            assert (ready.header("x-kvgate-reason"), ready.header("connection")) == ("draining", "close")
            assert int(ready.header("retry-after") or 0) >= 1
            async with await RawClient.connect(gateway.port) as new:
                assert (await answer_to(new, get("/health/live"))).status == 200
            for client in (kept, await RawClient.connect(gateway.port)):
                async with client:
                    answer = await answer_to(client, post(CHAT, PLAIN))
                    assert (answer.status, answer.header("connection")) == (200, "close")
                    assert await client.read_to_end() == b""
        gateway.process.send_signal(signal.SIGTERM)  # enough of it
        await refuses(gateway.port)
        assert await exit_code(gateway) == 0


async def test_who_still_waits_at_the_deadline_is_told(engine: FakeEngine) -> None:
    engine.script(behaviours.stall_before_head(), behaviours.endless(pause=0.01))
    async with Processes() as processes, contextlib.AsyncExitStack() as stack:
        gateway = await processes.start("--engine", engine.url, "--drain-timeout", "1")
        waiting, streaming, sending = [
            await stack.enter_async_context(await RawClient.connect(gateway.port)) for _ in range(3)
        ]
        await waiting.send(post(MESSAGES, minimal(MESSAGES)))
        await engine.received(1)
        await streaming.send(post(CHAT, STREAM))
        await engine.received(2)
        await sending.send(post(CHAT, PLAIN)[:-3])
        gateway.process.terminate()
        told = await waiting.read_response(10.0)
        assert (told.status, json.loads(told.body)["error"]["type"]) == (503, "overloaded_error")
        assert (told.header("x-kvgate-reason"), told.header("retry-after")) == ("draining", "1")
        told = await sending.read_response(10.0)
        assert (told.status, json.loads(told.body)["error"]["code"]) == (503, "draining")
        sending.close()
        cut = await streaming.read_response(10.0)
        assert (cut.status, cut.complete) == (200, False)
        assert json.loads(cut.events[-1])["error"]["code"] == "draining"
        assert await exit_code(gateway) == 0
        await engine.wait_for(lambda: engine.running == 0)
