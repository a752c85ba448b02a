"""The ledger's numbers where they are easily wrong: unknown is not 0, what is held is no twin's, a full hit teaches no grain."""

import random
from pathlib import Path

from server.ledger.ledger import Ledger
from tests.fakes import behaviours
from tests.fakes.engine import FakeEngine
from tests.fakes.raw_client import RawClient, post
from tests.llm.toys import write_folder
from tests.server.ledger.simulated import BLOCK, Stand, stand
from tests.server.running import running_gateway
from tests.server.test_churn import until

BODY = b'{"model":"tiny","prompt":"one two three","max_tokens":1}'


def ledger_of(s: Stand) -> Ledger:
    ledger = s.gateway.gateway.ledger
    assert ledger is not None
    return ledger


async def quiet(s: Stand) -> None:
    """Once all that requests left behind was announced."""
    ledger = ledger_of(s)
    await s.until(lambda: not ledger._spelling and not any(r.pending for r in ledger.index.replicas.values()))


async def test_of_an_engine_that_tells_nothing_nothing_is_predicted(engine: FakeEngine, tmp_path: Path) -> None:
    """Neither events nor the size of its cache: what it holds is not known, which is not the same as nothing."""
    engine.on_get("/metrics", behaviours.status(404))
    folder = write_folder(tmp_path / "model")
    async with running_gateway(engine.url, policy="cost", tokenizer=str(folder), kv_events="off") as gateway:
        ledger = gateway.gateway.ledger
        assert ledger is not None
        await until(lambda: ledger._shelf.of("tiny") is not None)
        async with await RawClient.connect(gateway.port) as client:
            await client.send(post("/v1/completions", BODY))
            answer = await client.read_response()
            assert (answer.status, answer.header("x-kvgate-routed-tokens")) == (200, None)
            assert answer.header("x-kvgate-delivered-tokens") == str(engine.cached_tokens)
        labels = {"model": "tiny", "stage": "routed"}
        assert gateway.metric("kvgate_prefix_tokens_total", **labels) is None
        assert gateway.metric("kvgate_prediction_error_tokens") is None


async def test_who_shares_no_more_than_is_held_is_no_twin(tmp_path: Path) -> None:
    async with stand(tmp_path, 1) as s:
        ledger, (replica,) = ledger_of(s), s.replicas
        system = "old dog " * 60
        await s.complete(system)
        await quiet(s)
        asked = ledger.ask("/v1/completions", "toy", {"prompt": f"{system} and more"}, None)
        other = ledger.ask("/v1/completions", "toy", {"prompt": f"{system} or else"}, None)
        assert other.prompt is not None
        ledger.look(asked)
        held = asked.match.tokens[replica.name]
        ledger._untokenised.add(other.namespace, other.prompt, replica.name)
        ledger.look(asked)
        assert (asked.twins, asked.match.tokens[replica.name]) == ({}, held)
        assert held > 3 * BLOCK

        longer = ledger.ask("/v1/completions", "toy", {"prompt": f"{system} and more {system}"}, None)
        twin = ledger.ask("/v1/completions", "toy", {"prompt": f"{system} and more {system} or else"}, None)
        assert twin.prompt is not None
        ledger._untokenised.add(twin.namespace, twin.prompt, replica.name)
        ledger.look(longer)
        assert longer.twins.keys() == {replica.name}
        assert longer.match.tokens[replica.name] > held
        assert longer.match.tokens[replica.name] % BLOCK == 0


async def test_prompts_that_end_with_a_block_teach_no_coarser_grain(tmp_path: Path) -> None:
    """Of such a prompt the last block is held, and never delivered."""
    async with stand(tmp_path, 1) as s:
        for blocks in (3, 5, 7, 9, 11):
            ids = random.Random(blocks).choices(range(10, 250), k=blocks * BLOCK)
            await s.complete(ids)
            await quiet(s)
            assert (await s.complete(ids)).cached == (blocks - 1) * BLOCK
            await quiet(s)
        ids = random.Random(0).choices(range(10, 250), k=3 * BLOCK + 4)
        await s.complete(ids)
        await quiet(s)
        again = await s.complete(ids)
        assert again.routed == again.cached == 3 * BLOCK
