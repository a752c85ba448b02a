"""A client that leaves, at any moment: the engine's work is aborted and everything is given back."""

import asyncio

import pytest

from tests.fakes import behaviours
from tests.fakes.behaviours import Stream
from tests.fakes.engine import FakeEngine
from tests.fakes.raw_client import RawClient, get, post
from tests.server.exchange.test_faults import CHAT, PLAIN, STREAM, still_serves
from tests.server.running import running_gateway


@pytest.mark.parametrize("how", ["close", "reset", "half_close"])
@pytest.mark.parametrize("body", [PLAIN, STREAM])
async def test_leaving_before_the_first_byte_aborts(engine: FakeEngine, body: bytes, how: str) -> None:
    async with running_gateway(engine.url) as gateway:
        engine.script(behaviours.stall_before_head())
        client = await RawClient.connect(gateway.port)
        await client.send(post(CHAT, body))
        request = await engine.received(1)
        await leave(client, how)
        await asyncio.wait_for(request.aborted.wait(), 5)
        await still_serves(gateway)
        assert gateway.metric("kvgate_requests_total", code="499") == 1
        client.close()


@pytest.mark.parametrize("how", ["close", "reset", "half_close"])
async def test_leaving_mid_stream_aborts(engine: FakeEngine, how: str) -> None:
    async with running_gateway(engine.url) as gateway:
        engine.script(behaviours.endless())
        client = await RawClient.connect(gateway.port)
        await client.send(post(CHAT, STREAM))
        await client.read_until(b"eeee")
        request = await engine.received(1)
        await leave(client, how)
        await asyncio.wait_for(request.aborted.wait(), 5)
        await still_serves(gateway)
        assert gateway.metric("kvgate_requests_total", code="499") == 1
        client.close()


async def test_leaving_while_the_engine_is_being_reached(engine: FakeEngine) -> None:
    from tests.fakes.engine import silent_port

    with silent_port() as port:
        async with running_gateway(engine.url, connect_timeout=2.0) as gateway:
            replica = gateway.gateway.replicas.all[0]
            replica.pool._port = port  # its health check still answers; connecting to it does not
            client = await RawClient.connect(gateway.port)
            await client.send(post(CHAT, PLAIN))
            async with asyncio.timeout(5):
                while gateway.inflight == 0:
                    await asyncio.sleep(0.005)
            client.close()
            await gateway.idle(1.0)
            assert gateway.metric("kvgate_requests_total", code="499") == 1


async def test_leaving_while_the_body_is_on_its_way(engine: FakeEngine) -> None:
    async with running_gateway(engine.url) as gateway:
        client = await RawClient.connect(gateway.port)
        await client.send(post(CHAT, PLAIN)[:-10])
        await asyncio.sleep(0.05)
        client.close()
        await still_serves(gateway)
        assert len(engine.posts) == 1
        assert gateway.metric("kvgate_requests_total", code="499") == 1


async def test_leaving_with_pipelined_requests_behind(engine: FakeEngine) -> None:
    async with running_gateway(engine.url) as gateway:
        engine.script(behaviours.stall_before_head())
        client = await RawClient.connect(gateway.port)
        await client.send(post(CHAT, PLAIN) + post(CHAT, PLAIN) + get("/health") + post(CHAT, PLAIN))
        request = await engine.received(1)
        client.close()
        await asyncio.wait_for(request.aborted.wait(), 5)
        await still_serves(gateway)
        assert len(engine.posts) == 2
        assert gateway.metric("kvgate_requests_total", code="499") == 3


async def test_a_client_that_does_not_read_slows_the_engine_and_not_the_memory(engine: FakeEngine) -> None:
    async with running_gateway(engine.url, idle_timeout=0.5) as gateway:
        engine.script(behaviours.endless(pause=0, text_bytes=4096))
        client = await RawClient.connect(gateway.port, receive_buffer=4096)
        await client.send(post(CHAT, STREAM))
        request = await engine.received(1)
        await asyncio.sleep(0.3)
        swallowed = request.sent
        await asyncio.sleep(0.1)
        assert request.sent == swallowed  # it has stopped
        assert swallowed < 16 * 1024 * 1024
        await asyncio.wait_for(request.aborted.wait(), 5)  # and is given up at last
        await gateway.idle()
        assert gateway.metric("kvgate_requests_total", code="499") == 1
        client.close()


async def test_a_slow_reader_gets_everything(engine: FakeEngine) -> None:
    async with running_gateway(engine.url) as gateway:
        stream = Stream(texts=["w" * 2000] * 1500)
        engine.script(stream)
        async with await RawClient.connect(gateway.port, receive_buffer=4096) as client:
            await client.send(post(CHAT, STREAM))
            await asyncio.sleep(0.3)
            answer = await client.read_response()
            assert answer.body == b"".join(Stream(texts=stream.texts, usage="never").events(engine.posts[0]))


async def leave(client: RawClient, how: str) -> None:
    if how == "close":
        client.close()
    elif how == "reset":
        client.reset()
    else:
        client.half_close()
