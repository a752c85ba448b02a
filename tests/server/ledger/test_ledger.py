"""The ledger end to end, in front of simulated engines: prompts go where they are held, and what is predicted is delivered."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from kvcache.match import usable
from loadtest.sim.text import WORDS
from tests.server.ledger.simulated import BLOCK, Stand, stand


def text(seed: object, words: int) -> str:
    r = random.Random(str(seed))
    return f"{seed} " + " ".join(r.choice(WORDS) for _ in range(words))


def fields_of(name: str, decision: str) -> dict[str, float]:
    """What x-kvgate-decision says of one replica."""
    part = next(part for part in decision.split(", ") if part.startswith(f"{name};"))
    return {key: float(value) for key, value in (pair.split("=") for pair in part.split(";")[1:])}


async def test_every_engine_passes_the_self_test(tmp_path: Path) -> None:
    async with stand(tmp_path) as s:
        for state in (await s.get("/kv/replicas"))["replicas"]:
            tokens = [state["self_test"][f"{what}_tokens"] for what in ("announced", "predicted", "delivered")]
            assert (state["self_test"]["ok"], tokens) == (True, [tokens[0]] * 3)
            assert tokens[0] >= 3 * BLOCK


async def test_a_prompt_goes_where_its_beginning_is_held_and_hits_as_predicted(tmp_path: Path) -> None:
    async with stand(tmp_path, 4) as s:
        prefixes = [text(n, 200) for n in range(8)]
        homes = {prefix: (await s.complete(prefix)).replica for prefix in prefixes}
        assert len(set(homes.values())) == 4
        for turn in range(3):
            for prefix in prefixes:
                answer = await s.complete(f"{prefix} {text(('turn', turn), 20)}")
                assert answer.replica == homes[prefix]
                assert answer.routed == answer.cached > 180


async def test_chats_and_messages_share_what_they_share(tmp_path: Path) -> None:
    async with stand(tmp_path) as s:
        system = text("system", 150)
        chat = [{"role": "system", "content": system}, {"role": "user", "content": "One?"}]
        first = await s.ask("/v1/chat/completions", {"messages": chat, "max_tokens": 1})
        chat[1] = {"role": "user", "content": "Two!"}
        second = await s.ask("/v1/chat/completions", {"messages": chat, "max_tokens": 1})
        assert (first.routed, second.replica) == (0, first.replica)
        assert second.routed == second.cached > 100


async def test_a_model_whose_prompts_are_matched_by_tokens_hits_as_predicted(tmp_path: Path) -> None:
    async with stand(tmp_path, by_bytes=False) as s:
        for state in (await s.get("/kv/replicas"))["replicas"]:
            assert state["self_test"]["ok"], state["self_test"]
        prefix = text("tokens", 200)
        first, again = [await s.complete(f"{prefix} {turn}") for turn in ("one", "two")]
        assert (first.routed, again.replica) == (0, first.replica)
        assert again.routed == again.cached > 100
        ids = {"prompt": [1 << 40], "max_tokens": 1}  # which no four bytes hold
        async with s.session.post(f"{s.gateway.url}/v1/completions", json=ids) as refused:
            assert refused.status == 400
        assert s.ledger.faults.count == 0


async def test_a_prompt_that_was_only_counted_is_held_nowhere(tmp_path: Path) -> None:
    async with stand(tmp_path) as s:
        prompt = text("counted", 200)
        async with s.session.post(f"{s.gateway.url}/tokenize", json={"prompt": prompt}) as counted:
            assert (await counted.json())["count"] > 100
            assert "x-kvgate-routed-tokens" not in counted.headers
        first = await s.complete(prompt)
        assert (first.routed, first.cached) == (0, 0)


async def test_a_burst_with_one_new_prefix_is_computed_once(tmp_path: Path) -> None:
    async with stand(tmp_path, 4) as s:
        prefix = text("burst", 400)
        answers = await asyncio.gather(*(s.complete(f"{prefix} {n}") for n in range(12)))
        assert len({answer.replica for answer in answers}) == 1


async def test_salts_are_worlds_of_their_own(tmp_path: Path) -> None:
    async with stand(tmp_path) as s:
        prompt = text("salted", 100)
        await s.complete(prompt)
        assert [(a.routed, a.cached) for a in [await s.complete(prompt, cache_salt="x")]] == [(0, 0)]
        again = await s.complete(prompt, cache_salt="x")
        assert again.routed == again.cached > 0


async def test_token_ids_are_matched_like_text(tmp_path: Path) -> None:
    async with stand(tmp_path) as s:
        ids = random.Random(3).choices(range(10, 250), k=100)
        await s.complete(ids)
        answer = await s.complete([*ids, 5, 6, 7])
        assert answer.routed == answer.cached == 96


async def test_evicted_blocks_are_not_counted_on(tmp_path: Path) -> None:
    async with stand(tmp_path, 1, blocks=60) as s:
        old = text("old", 300)
        await s.complete(old)
        for n in range(4):
            await s.complete(text(("filler", n), 400))
        await s.until(lambda: s.idle)
        answer = await s.complete(old)
        assert answer.routed == answer.cached < 300


async def test_the_three_numbers_are_told_by_tenant(tmp_path: Path) -> None:
    async with stand(tmp_path, 2) as s:
        prompt = text("three", 120)
        await s.complete(prompt)
        answer = await s.complete(prompt)
        (row,) = (await s.get("/kv/ledger"))["rows"]
        held = usable(answer.prompt // BLOCK * BLOCK, answer.prompt, BLOCK)
        assert row["available_tokens"] == row["routed_tokens"] == row["delivered_tokens"] == held
        assert row["prompt_tokens"] == 2 * answer.prompt
        assert (row["routing_loss_tokens"], row["engine_loss_tokens"], row["unmatched_prompt_tokens"]) == (0, 0, 0)


async def test_what_waits_elsewhere_is_the_routing_loss(tmp_path: Path) -> None:
    async with stand(tmp_path, 2) as s:
        prompt = text("hot", 120)
        home = (await s.complete(prompt)).replica
        (busy,) = [replica for replica in s.replicas if replica.name == home]
        job = busy.work.begin(10_000_000, 0, float("inf"))  # more than computing the prompt anew costs
        answer = await s.complete(prompt)
        busy.work.end(job)
        assert answer.replica != home
        assert (answer.routed, answer.cached) == (0, 0)
        (row,) = (await s.get("/kv/ledger"))["rows"]
        assert row["routing_loss_tokens"] == usable(answer.prompt // BLOCK * BLOCK, answer.prompt, BLOCK)


async def test_the_decision_is_explained_to_who_asks(tmp_path: Path) -> None:
    async with stand(tmp_path, 2) as s:
        prompt = text("why", 120)
        first = await s.complete(prompt)
        body = {"prompt": prompt, "max_tokens": 1}
        answer = await s.ask("/v1/completions", body, **{"x-kvgate-debug": "decision"})
        decision = answer.headers["x-kvgate-decision"]
        assert decision.startswith(f"{first.replica};")
        (other,) = {replica.name for replica in s.replicas} - {first.replica}
        here, there = fields_of(first.replica, decision), fields_of(other, decision)
        assert here["held"] == answer.cached
        assert (there["held"], here["cost"] < there["cost"]) == (0, True)
        assert "x-kvgate-decision" not in (await s.complete(prompt)).headers


async def test_a_failed_engine_expects_nothing_and_its_work_is_forgotten(tmp_path: Path) -> None:
    async with stand(tmp_path, 2) as s:
        prompt = text("fails", 300)
        await s.fleet.replicas[0].stop()
        await s.fleet.replicas[1].stop()
        async with s.session.post(f"{s.gateway.url}/v1/completions", json={"prompt": prompt}) as response:
            assert response.status == 503
        await s.until(lambda: all((r.work.queued, r.work.kv, r.inflight) == (0, 0, 0) for r in s.replicas))


async def test_work_is_given_back_on_every_way_out(tmp_path: Path) -> None:
    async with stand(tmp_path, 2) as s:
        for n in range(6):
            await s.complete(text(n, 50), stream=False)
            async with s.session.post(
                f"{s.gateway.url}/v1/completions", json={"prompt": text(n, 80), "stream": True, "max_tokens": 300}
            ) as response:
                await response.content.readany()  # and leave
        await s.until(lambda: all((r.work.queued, r.work.kv, r.inflight) == (0, 0, 0) for r in s.replicas))


async def test_without_events_what_was_sent_is_taken_to_be_held(tmp_path: Path) -> None:
    async with stand(tmp_path, 3, events=False) as s:
        prefixes = [text(n, 150) for n in range(6)]
        homes = {prefix: (await s.complete(prefix)).replica for prefix in prefixes}
        await s.until(lambda: sum(map(held(s), s.replicas)) >= 6 * (150 // BLOCK))
        for prefix in prefixes:
            answer = await s.complete(f"{prefix} {text('more', 9)}")
            assert answer.replica == homes[prefix]
            assert answer.routed == answer.cached > 0


def held(s: Stand):  # type: ignore[no-untyped-def]  # a function of a replica
    ledger = s.gateway.gateway.ledger
    assert ledger is not None
    return lambda replica: ledger.index.held(replica.name) if replica.name in ledger.index.replicas else 0


async def test_an_engine_that_does_not_say_what_it_delivered_is_told_so(tmp_path: Path) -> None:
    async with stand(tmp_path, 1, details=False) as s:
        (state,) = (await s.get("/kv/replicas"))["replicas"]
        assert "--enable-prompt-tokens-details" in state["self_test"]["problem"]


@pytest.mark.parametrize("prompt", [["one", "two"], [[1, 2], [3, 4]]])
async def test_several_prompts_at_once_go_by_load(tmp_path: Path, prompt: list[object]) -> None:
    async with stand(tmp_path, 1) as s:
        async with s.session.post(
            f"{s.gateway.url}/v1/completions", json={"prompt": prompt, "max_tokens": 1}
        ) as response:
            assert response.status == 200, await response.text()
            assert "x-kvgate-routed-tokens" not in response.headers
        assert (await s.get("/kv/ledger"))["index"]["unrendered_requests"] == {"several_prompts": 1}


async def test_what_an_engine_refuses_is_not_expected_to_be_held(tmp_path: Path) -> None:
    async with stand(tmp_path, 1) as s:
        prompt = text("refused", 200)
        async with s.session.post(
            f"{s.gateway.url}/v1/completions", json={"prompt": prompt, "max_tokens": -1}
        ) as response:
            assert response.status == 400
        answer = await s.complete(prompt)
        assert (answer.routed, answer.cached) == (0, 0)
