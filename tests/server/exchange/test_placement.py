"""What an answer tells of its place: that of the attempt that it came from, and nothing that is not known."""

from tests.fakes import behaviours
from tests.fakes.engine import FakeEngine
from tests.fakes.raw_client import RawClient, Response, post
from tests.server.running import RunningGateway, running_gateway

BODY = b'{"model":"tiny","prompt":"one two three","max_tokens":1}'


async def ask(gateway: RunningGateway) -> Response:
    async with await RawClient.connect(gateway.port) as client:
        await client.send(post("/v1/completions", BODY, [("x-kvgate-debug", "decision")]))
        return await client.read_response()


def decision(answer: Response) -> str:
    found: str = answer.header("x-kvgate-decision") or ""
    return found


async def test_an_answer_is_explained_by_its_own_attempt_though_another_was_looked_for(engine: FakeEngine) -> None:
    async with running_gateway(engine.url, policy="cost") as gateway:
        engine.script(behaviours.status(503))
        answer = await ask(gateway)
        assert answer.status == 503
        assert decision(answer).startswith(f"127.0.0.1:{engine.port};cost=")


async def test_a_second_attempt_is_explained_by_what_was_left(engine: FakeEngine) -> None:
    async with FakeEngine() as other, running_gateway(engine.url, other.url, policy="cost") as gateway:
        engine.script(behaviours.status(503))
        other.script(behaviours.status(503))
        answer = await ask(gateway)
        last = [e for e in (engine, other) if e.url.endswith(answer.header("x-kvgate-replica") or "-")]
        assert decision(answer).startswith(f"127.0.0.1:{last[0].port};")
        assert ", " not in decision(answer)
