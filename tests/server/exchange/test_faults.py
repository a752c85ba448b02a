"""What an engine does wrong: each ends in a clear error in the caller's shape, and nothing is left behind."""

import asyncio
import json

import pytest

from tests.fakes import behaviours
from tests.fakes.behaviours import Stream, Whole
from tests.fakes.engine import FakeEngine, refused_port
from tests.fakes.raw_client import RawClient, Response, post
from tests.server.running import RunningGateway, running_gateway

CHAT = "/v1/chat/completions"
PLAIN = b'{"model":"tiny","messages":[{"role":"user","content":"secret words"}]}'
STREAM = b'{"model":"tiny","stream":true,"messages":[{"role":"user","content":"secret words"}]}'


def error(answer: Response) -> dict[str, object]:
    fields = json.loads(answer.body)["error"]
    assert fields.keys() == {"message", "type", "param", "code"}
    assert "secret" not in fields["message"]
    return fields  # type: ignore[no-any-return]


async def ask(gateway: RunningGateway, body: bytes) -> Response:
    async with await RawClient.connect(gateway.port) as client:
        await client.send(post(CHAT, body))
        return await client.read_response()


async def still_serves(gateway: RunningGateway) -> None:
    await gateway.idle()
    assert (await ask(gateway, PLAIN)).status == 200
    assert gateway.inflight == 0


@pytest.mark.parametrize("body", [PLAIN, STREAM])
@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        (behaviours.close_before_answer(), "engine_failed"),
        (behaviours.reset(), "engine_failed"),
        (behaviours.garbage(), "engine_failed"),
        (behaviours.huge_headers(300 * 1024), "engine_failed"),
        (behaviours.cut_body(10, 100), "engine_failed"),
        (behaviours.cut_body(10, 100, rst=True), "engine_failed"),
        (Stream(stop_after=0, stop="cut"), "engine_failed"),
    ],
)
async def test_a_broken_answer_before_the_first_byte_is_502(
    engine: FakeEngine, body: bytes, behaviour: behaviours.Behaviour, code: str
) -> None:
    async with running_gateway(engine.url) as gateway:
        engine.script(behaviour)
        answer = await ask(gateway, body)
        assert (answer.status, error(answer)["code"]) == (502, code)
        assert len(engine.posts) == 1  # it may have been read: it is not sent twice
        await still_serves(gateway)
        assert gateway.metric("kvgate_requests_total", code="502") == 1


@pytest.mark.parametrize("stop", ["cut", "cut_event", "cut_chunk", "reset"])
async def test_a_cut_stream_ends_in_an_error_event_and_never_looks_complete(engine: FakeEngine, stop: str) -> None:
    async with running_gateway(engine.url) as gateway:
        stream = Stream(stop_after=3, stop=stop)  # type: ignore[arg-type]
        engine.script(stream)
        answer = await ask(gateway, STREAM)
        assert answer.status == 200
        assert not answer.complete
        whole = [e.removeprefix(b"data: ").strip() for e in stream.events(engine.posts[0])[:3]]
        assert answer.events[:-1] == whole
        assert json.loads(answer.events[-1])["error"]["code"] == "engine_failed"
        assert b"[DONE]" not in answer.body
        await still_serves(gateway)


async def test_a_large_answer_cut_after_its_head_is_short(engine: FakeEngine) -> None:
    async with running_gateway(engine.url) as gateway:
        engine.script(behaviours.cut_body(2_000_000, 3_000_000))
        answer = await ask(gateway, PLAIN)
        assert (answer.status, answer.complete) == (200, False)
        assert len(answer.body) == 2_000_000
        await still_serves(gateway)


async def test_an_engine_that_never_begins_times_out(engine: FakeEngine) -> None:
    async with running_gateway(engine.url, first_byte_timeout=0.2, idle_timeout=0.3) as gateway:
        for behaviour in (behaviours.stall_before_head(), behaviours.stall_after_head()):
            engine.script(behaviour)
            answer = await ask(gateway, PLAIN)
            assert (answer.status, error(answer)["code"]) == (504, "engine_timeout")
            await engine.wait_for(lambda: engine.running == 0)
        await still_serves(gateway)


@pytest.mark.parametrize("after", [0, 2])
async def test_an_engine_that_stalls_in_a_stream_times_out(engine: FakeEngine, after: int) -> None:
    async with running_gateway(engine.url, idle_timeout=0.2) as gateway:
        engine.script(Stream(stop_after=after, stop="stall"))
        answer = await ask(gateway, STREAM)
        if after == 0:
            assert (answer.status, error(answer)["code"]) == (504, "engine_timeout")
        else:
            assert not answer.complete
            assert json.loads(answer.events[-1])["error"]["code"] == "engine_timeout"
        await engine.wait_for(lambda: engine.running == 0)
        await still_serves(gateway)


async def test_a_slow_stream_is_not_idle(engine: FakeEngine) -> None:
    async with running_gateway(engine.url, idle_timeout=0.3) as gateway:
        engine.script(Stream(pause=0.1))  # longer in all than the time-out
        assert (await ask(gateway, STREAM)).events[-1] == b"[DONE]"


async def test_bytes_behind_an_answer_do_not_reach_the_client(engine: FakeEngine) -> None:
    extra = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
    for after in (extra, b"junk"):
        for close in (False, True):
            engine.script(Whole(after=after, close=close))
            async with running_gateway(engine.url) as gateway, await RawClient.connect(gateway.port) as client:
                await client.send(post(CHAT, PLAIN))
                answer = await client.read_response()
                assert answer.body == Whole().content(engine.posts[-1])
                await client.send(post(CHAT, PLAIN))
                second = await client.read_response()
                assert second.body == Whole().content(engine.posts[-1])


async def test_a_kept_connection_that_the_engine_closed_costs_no_request(engine: FakeEngine) -> None:
    async with running_gateway(engine.url, health_interval=60, scrape_interval=60) as gateway:
        await still_serves(gateway)
        engine.script(behaviours.close_before_answer())  # as if it had closed just when the request was sent
        assert (await ask(gateway, PLAIN)).status == 200
        assert gateway.metric("kvgate_retries_total", replica=f"127.0.0.1:{engine.port}") == 1
        engine.script(behaviours.close_before_answer(), behaviours.close_before_answer())
        assert (await ask(gateway, PLAIN)).status == 502  # anew once, not for ever
        assert gateway.inflight == 0


async def test_no_engine_is_503_with_retry_after_and_comes_back(engine: FakeEngine) -> None:
    async with running_gateway(engine.url) as gateway:
        await still_serves(gateway)
        await engine.stop()
        answer = await ask(gateway, PLAIN)
        assert (answer.status, error(answer)["code"]) == (503, "engine_unavailable")
        assert int(answer.header("retry-after") or "") >= 1
        await engine.start()
        async with asyncio.timeout(5):
            while not gateway.gateway.ready:
                await asyncio.sleep(0.02)
        await still_serves(gateway)


async def test_an_engine_that_was_never_there_is_503() -> None:
    with refused_port() as port:
        async with running_gateway(f"http://127.0.0.1:{port}") as gateway:
            answer = await ask(gateway, PLAIN)
        assert (answer.status, error(answer)["type"]) == (503, "overloaded_error")


async def test_a_dead_replica_s_share_goes_to_the_other_at_once(engine: FakeEngine) -> None:
    async with FakeEngine() as other, running_gateway(engine.url, other.url, health_interval=30.0) as gateway:
        await other.stop()
        answers = [await ask(gateway, PLAIN) for _ in range(20)]
        assert {a.status for a in answers} == {200}
        assert len(engine.posts) == 20
        assert gateway.metric("kvgate_retries_total", replica=f"127.0.0.1:{other.port}") == 1  # then it is known
        assert gateway.metric("kvgate_breaker_open", replica=f"127.0.0.1:{other.port}") == 1


async def test_ties_rotate_and_load_decides(engine: FakeEngine) -> None:
    async with FakeEngine() as other, running_gateway(engine.url, other.url, policy="least-load") as gateway:
        for _ in range(10):
            await ask(gateway, PLAIN)
        assert (len(engine.posts), len(other.posts)) == (5, 5)
        gate = asyncio.Event()
        engine.always(behaviours.gated(gate))
        other.always(behaviours.gated(gate))
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(ask(gateway, PLAIN))
            async with asyncio.timeout(5):
                while gateway.inflight < 1:
                    await asyncio.sleep(0.01)
            busy, idle = (engine, other) if engine.running else (other, engine)
            before = len(busy.posts)
            idle.always(None)
            for _ in range(4):
                await ask(gateway, PLAIN)
            assert len(busy.posts) == before
            gate.set()
        assert waiting.result().status == 200


async def test_a_fault_of_the_gateway_s_own_is_500_and_logged(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_gateway(engine.url) as gateway:
        with monkeypatch.context() as patch:
            patch.setattr(type(gateway.gateway), "admit", lambda *_: 1 / 0)
            answer = await ask(gateway, PLAIN)
        assert (answer.status, error(answer)["code"]) == (500, "internal_error")
        assert b"division" not in answer.raw
        assert "ZeroDivisionError" in caplog.text
        await still_serves(gateway)
