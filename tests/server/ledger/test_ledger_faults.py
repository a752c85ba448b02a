"""The ledger when engines restart, lose events, leave, or do not deliver: it is right again, and no request pays for it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from loadtest.sim.hashing import ALGORITHMS
from loadtest.sim.replica import Replica as Sim
from loadtest.sim.request import Request
from loadtest.sim.text import WORDS
from server.ledger import ledger as ledger_module
from server.ledger import subscriber, trials
from server.ledger.subscriber import Patience
from server.replica import Replica
from tests.server.ledger.simulated import BLOCK, Stand, stand

NEVER = 3600.0  # s between two health checks that are not to notice anything


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ledger waits for comes soon."""
    monkeypatch.setattr(subscriber, "Patience", partial(Patience, idle=0.1))
    monkeypatch.setattr(ledger_module, "ANNOUNCED", 0.05)
    monkeypatch.setattr(ledger_module, "TICK", 0.05)
    monkeypatch.setattr(trials, "AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(trials, "EVENTS_SECONDS", 0.5)


def text(seed: object, words: int) -> str:
    r = random.Random(str(seed))
    return f"{seed} " + " ".join(r.choice(WORDS) for _ in range(words))


def sim_of(s: Stand, name: str) -> Sim:
    (sim,) = [sim for sim in s.fleet.replicas if sim.url.endswith(name)]
    return sim


def replica_of(s: Stand, name: str) -> Replica:
    (replica,) = [replica for replica in s.replicas if replica.name == name]
    return replica


def cached(sim: Sim, prompt: str) -> int:
    """Tokens of the prompt's beginning that the engine's cache holds, by its own hashes."""
    assert sim.engine is not None
    ids = sim.settings.language.coder.encode(prompt, specials=True)
    hashes = Request("", ids, 1, BLOCK, hashing=ALGORITHMS[sim.settings.shape.algorithm]).hashes
    return BLOCK * len(sim.engine.scheduler.cache.pool.find_prefix(hashes))


def held(s: Stand, prompt: str) -> dict[str, int]:
    """Tokens of the prompt's beginning by replica, as the ledger has it."""
    asked = s.ledger.ask("/v1/completions", "toy", {"prompt": prompt}, None)
    s.ledger.look(asked)
    return dict(asked.held.tokens)


def is_right(s: Stand, prompts: Sequence[str], certainly: bool = True) -> bool:
    """Whether every replica is up, and the index has what it caches of each prompt; and it says to be certain."""
    for replica in s.replicas:
        sim = sim_of(s, replica.name)
        if not replica.up or sim.engine is None or replica.name not in s.ledger.index.replicas:
            return False
        if certainly and s.ledger.index.uncertain(replica.name):
            return False
        if s.ledger.index.replicas[replica.name].pending:
            return False
    return all(
        held(s, prompt).get(replica.name, 0) == cached(sim_of(s, replica.name), prompt)
        for prompt in prompts
        for replica in s.replicas
    )


async def traffic(s: Stand, prompts: Sequence[str], rounds: int, seed: int = 0) -> None:
    """Each answered, whatever happens meanwhile."""
    r = random.Random(seed)
    for _ in range(rounds):
        await asyncio.gather(*(s.complete(f"{r.choice(prompts)} {text(r.random(), 30)}") for _ in range(8)))


def passed(replica: Replica) -> bool:
    return replica.self_test is not None and replica.self_test["ok"] is True


# -- restarts


async def test_a_restarted_engine_is_known_to_hold_nothing(tmp_path: Path) -> None:
    prompts = [text(n, 120) for n in range(9)]
    async with stand(tmp_path, 3) as s:
        homes = {prompt: (await s.complete(prompt)).replica for prompt in prompts}
        victim = homes[prompts[0]]
        mine = [prompt for prompt, home in homes.items() if home == victim]
        await sim_of(s, victim).restart(0.3)
        for prompt in prompts:  # while it is down and after: whoever is healthy answers
            assert (await s.complete(prompt)).replica != victim or sim_of(s, victim).engine is not None
        await s.until(lambda: passed(replica_of(s, victim)) and is_right(s, prompts))
        assert all(victim not in held(s, prompt) for prompt in mine)
        assert s.gateway.metric("kvgate_requests_total") == 2 * len(prompts)
        await traffic(s, prompts, 2)
        await s.until(lambda: is_right(s, prompts) and s.idle)


@pytest.mark.parametrize("replay", [True, False])
async def test_a_restart_that_no_health_check_sees_is_noticed_all_the_same(tmp_path: Path, replay: bool) -> None:
    prompts = [text(n, 100) for n in range(4)]
    async with stand(tmp_path, 2, replay=replay, health_interval=NEVER) as s:
        tests = [replica.self_test for replica in s.replicas]
        for prompt in prompts:
            await s.complete(prompt)
        await s.until(lambda: is_right(s, prompts))
        assert any(held(s, prompt) for prompt in prompts)
        await asyncio.gather(*(sim.restart(0.0) for sim in s.fleet.replicas))
        await s.until(
            lambda: all(passed(r) and r.self_test is not test for r, test in zip(s.replicas, tests, strict=True))
        )
        await s.until(lambda: not any(held(s, prompt) for prompt in prompts))
        await traffic(s, prompts, 1)
        await s.until(
            lambda: is_right(s, prompts, certainly=replay)
        )  # the first batch of a new process may have been missed


async def test_engines_that_restart_out_of_order_while_requests_run(tmp_path: Path) -> None:
    prompts = [text(n, 100) for n in range(6)]
    async with stand(tmp_path, 3) as s:
        await traffic(s, prompts, 2)
        first, second, third = s.fleet.replicas
        await second.restart(0.4)
        await traffic(s, prompts, 2, seed=1)
        await first.restart(0.1)  # back before the second
        await traffic(s, prompts, 2, seed=2)
        await s.until(lambda: all(sim.engine is not None for sim in s.fleet.replicas))
        await asyncio.gather(third.restart(0.2), second.restart(0.0))  # the second again, and two at once
        await traffic(s, prompts, 2, seed=3)
        await s.until(lambda: all(map(passed, s.replicas)) and is_right(s, prompts) and s.idle)


# -- events


async def test_lost_events_are_had_again(tmp_path: Path) -> None:
    prompts = [text(n, 150) for n in range(20)]
    async with stand(tmp_path, 2, blocks=150) as s:
        for sim in s.fleet.replicas:
            sim.injector.change({"event_loss_share": 0.1})
        await traffic(s, prompts, 40)  # far more than fits: blocks are evicted all the time
        for sim in s.fleet.replicas:
            sim.injector.change({"event_loss_share": 0.0})
        await s.until(lambda: is_right(s, prompts) and s.idle)
        assert s.gateway.metric("kvgate_kv_event_gaps_total"), "nothing was lost"
        for replica in s.replicas:
            engine = sim_of(s, replica.name).engine
            assert engine is not None
            assert s.ledger.index.held(replica.name) == engine.scheduler.cache.pool.cached_count


def test_lost_events_are_asked_for_within_five_seconds() -> None:
    assert Patience().idle <= 4.0


async def test_without_replays_all_is_well_until_events_are_lost_and_said_so_then(tmp_path: Path) -> None:
    prompts = [text(n, 120) for n in range(6)]
    async with stand(tmp_path, 2, replay=False) as s:
        await traffic(s, prompts, 3)
        await s.until(lambda: is_right(s, prompts))
        s.fleet.replicas[0].injector.change({"event_loss_share": 1.0})
        (victim,) = [replica for replica in s.replicas if s.fleet.replicas[0].url.endswith(replica.name)]
        before = victim.self_test
        while not s.ledger.index.uncertain(victim.name):
            await traffic(s, prompts, 1, seed=random.randrange(1 << 30))
            s.fleet.replicas[0].injector.change({"event_loss_share": 0.5})
        assert victim.faith <= 0.5
        assert victim.self_test is before, "a gap is no restart"
        s.fleet.replicas[0].injector.change({"event_loss_share": 0.0})
        await s.fleet.replicas[0].restart(0.0)
        await s.until(lambda: passed(victim) and victim.self_test is not before)
        await s.until(lambda: is_right(s, prompts, certainly=False))  # its first batch may have been missed


async def test_a_prompt_that_is_tokenised_too_late_is_not_expected_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "ANNOUNCED", NEVER)
    monkeypatch.setattr(ledger_module, "SOON", 0.0)
    prompt = text("late", 300)
    async with stand(tmp_path, 1, blocks=60) as s:
        asked = asyncio.Event()
        blocks = s.ledger._tokeniser.blocks

        async def late(*args: Any) -> Any:
            made = await blocks(*args)
            await asked.wait()
            return made

        with monkeypatch.context() as patched:
            patched.setattr(s.ledger._tokeniser, "blocks", late)
            await s.complete(prompt)
        for n in range(4):
            await s.complete(text(("filler", n), 400))
        asked.set()
        await s.until(lambda: not s.ledger._spelling)
        answer = await s.complete(prompt)
        assert answer.routed == answer.cached == 0


# -- engines without events


@pytest.mark.parametrize("health_interval", [0.1, NEVER])
async def test_what_was_inferred_of_a_restarted_engine_is_forgotten(tmp_path: Path, health_interval: float) -> None:
    prompts = [text(n, 120) for n in range(6)]
    async with stand(tmp_path, 2, events=False, health_interval=health_interval) as s:
        for prompt in prompts:
            await s.complete(prompt)
        await s.until(lambda: sum(bool(held(s, prompt)) for prompt in prompts) == len(prompts))
        await asyncio.gather(*(sim.restart(0.0) for sim in s.fleet.replicas))
        await s.until(lambda: not any(held(s, prompt) for prompt in prompts))
        await s.until(lambda: all(map(passed, s.replicas)))
        again = await s.complete(prompts[0])
        assert (again.routed, again.cached) == (0, 0)


# -- engines that leave


async def test_an_engine_that_leaves_takes_its_entries_along_and_may_come_back(tmp_path: Path) -> None:
    prompts = [text(n, 120) for n in range(4)]
    file = tmp_path / "engines"
    async with stand(tmp_path, 2, engines_file=file) as s:
        urls = file.read_text().split()
        await traffic(s, prompts, 2)
        leaves = s.replicas[1]
        running = asyncio.gather(*(s.complete(text(("long", n), 100), max_tokens=400) for n in range(6)))
        await s.until(lambda: leaves.inflight > 0)
        file.write_text(next(url for url in urls if not url.endswith(leaves.name)))
        await running
        await s.until(lambda: leaves.name not in s.ledger.index.replicas)
        assert not any(leaves.name in held(s, prompt) for prompt in prompts)
        for name in ("kvgate_kv_cached_ratio", "kvgate_kv_event_gaps_total", "kvgate_hits_missing"):
            assert s.gateway.metric(name, replica=leaves.name) is None, name
        file.write_text("\n".join(urls))
        await s.until(lambda: len(s.replicas) == 2 and all(map(passed, s.replicas)) and is_right(s, prompts))
        assert s.replicas[1] is not leaves
        assert any(leaves.name in held(s, prompt) for prompt in prompts), "its cache was there all the time"
        await traffic(s, prompts, 1)


async def test_what_a_dead_engine_held_is_not_available(tmp_path: Path) -> None:
    prompt = text("dead", 120)
    async with stand(tmp_path, 2) as s:
        home = (await s.complete(prompt)).replica
        await s.until(lambda: held(s, prompt).keys() == {home})
        await sim_of(s, home).restart(NEVER)
        await s.until(lambda: not held(s, prompt))
        await s.complete(prompt)
        (row,) = (await s.get("/kv/ledger"))["rows"]
        assert row["available_tokens"] == row["routing_loss_tokens"] == 0


# -- predictions that do not come true


async def test_who_delivers_nothing_is_passed_over_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [text(n, 120) for n in range(8)]
    async with stand(tmp_path, 2) as s:
        homes = {prompt: (await s.complete(prompt)).replica for prompt in prompts}
        bad = homes[prompts[0]]
        replica, engine = replica_of(s, bad), sim_of(s, bad).engine
        assert engine is not None
        mine = [prompt for prompt, home in homes.items() if home == bad]
        assert s.gateway.metric("kvgate_hits_missing", replica=bad) == 0
        await s.until(lambda: is_right(s, prompts))
        with monkeypatch.context() as patched:
            patched.setattr(engine.scheduler.cache, "looks_up", lambda request: False)
            while not replica.prediction.missing:
                answer = await s.complete(mine[0])
                assert (answer.replica, answer.cached) == (bad, 0)
                await s.until(lambda: s.idle)
            assert s.gateway.metric("kvgate_hits_missing", replica=bad) == 1
            (other,) = [sim for sim in s.fleet.replicas if not sim.url.endswith(bad)]
            for prompt in mine:
                body = {"model": "toy", "prompt": prompt, "max_tokens": 1}
                async with s.session.post(f"{other.url}/v1/completions", json=body) as response:
                    assert response.status == 200
            await s.until(lambda: is_right(s, mine))
            for prompt in mine:
                answer = await s.complete(prompt)
                assert (answer.replica, answer.routed) == (f"127.0.0.1:{other.port}", answer.cached)
            await s.until(lambda: replica.self_test is not None and not replica.self_test["ok"])
        await s.until(lambda: not replica.prediction.missing)
        assert s.gateway.metric("kvgate_hits_missing", replica=bad) == 0
        assert passed(replica)
        assert replica.faith == 1.0


# -- faults of the ledger's own


PLACES = [
    ("kvcache.index.PrefixIndex", "match"),
    ("server.ledger.untokenised.Untokenised", "shared"),
    ("llm.renderer.Renderer", "render"),
    ("server.ledger.ledger.Ledger", "look"),
    ("server.ledger.ledger.Ledger", "sent"),
    ("server.ledger.ledger.Ledger", "_expect"),
    ("server.ledger.ledger.Ledger", "_judge"),
    ("server.ledger.ledger.Ledger", "failed"),
    ("kvcache.expected.Expected", "extend"),
    ("server.ledger.tokeniser.Tokeniser", "blocks"),
]


async def test_no_request_pays_for_a_fault_of_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object, **more: object) -> Any:
        raise RuntimeError("a fault made by a test")

    prompt = text("faulty", 60)
    async with stand(tmp_path, 2) as s:
        for path, name in PLACES:
            faults = s.ledger.faults.count
            with monkeypatch.context() as patched:
                patched.setattr(f"{path}.{name}", fail)
                for stream in (False, True):
                    body = {"prompt": prompt, "max_tokens": 2, "stream": stream}
                    async with s.session.post(f"{s.gateway.url}/v1/completions", json=body) as response:
                        assert response.status == 200, (path, name)
                        await response.read()
                await s.until(lambda: not s.ledger._spelling)
            if name != "failed":
                assert s.ledger.faults.count > faults, (path, name)
            assert all((r.work.queued, r.work.kv, r.inflight) == (0, 0, 0) for r in s.replicas), (path, name)
        await s.until(lambda: s.gateway.gateway.queues.waiting == 0)
        again = await s.complete(prompt)
        assert again.routed == again.cached > 0
        told = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert 0 < len(told) < s.ledger.faults.count
        assert (await s.get("/kv/ledger"))["index"]["faults"] == s.ledger.faults.count


async def test_a_prompt_of_many_pieces_is_made_beside_the_loop_and_matched(tmp_path: Path) -> None:
    roles = ("user", "assistant")
    chat = [{"role": roles[n % 2], "content": f"{n} the old dog"} for n in range(401)]
    async with stand(tmp_path, 2, blocks=1200) as s:
        first = await s.ask("/v1/chat/completions", {"messages": chat, "max_tokens": 1})
        second = await s.ask("/v1/chat/completions", {"messages": chat, "max_tokens": 1})
        assert second.replica == first.replica
        assert second.routed is not None
        assert second.cached == (second.prompt - 1) // BLOCK * BLOCK > 1000
        assert second.routed >= second.cached


# -- memory


async def test_nothing_grows_with_the_number_of_prompts(tmp_path: Path) -> None:
    async with stand(tmp_path, 2, blocks=60) as s:
        for n in range(40):
            await asyncio.gather(*(s.complete(text((n, m), 120)) for m in range(8)))
        index = s.ledger.index
        assert index.forest.blocks <= index.limit < 2 * 60 * 2 + 1100
        await s.until(lambda: s.idle)
        await s.until(lambda: s.ledger._expected.tickets < 150)  # some seconds later: events may still confirm them
        assert all(len(r.work._due) == 0 for r in s.replicas)
        assert s.ledger.faults.count == 0
