"""pytest tests/engine/test_sim_against_vllm.py: the simulated engine does what the real one does.

First against vLLM's own scheduler, alone, step by step and event by event, under concurrency and preemption. Then against
the running engine: the same requests, one after the other, must hit the same tokens.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import urllib.request
from array import array
from itertools import takewhile
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from llm.cache import user_cache
from llm.smollm2 import converter, model_folder
from loadtest.sim.asks import Model
from loadtest.sim.blocks import Event, Removed, Stored
from loadtest.sim.cache import KvCache
from loadtest.sim.engine import Shape
from loadtest.sim.events import to_wire
from loadtest.sim.fleet import Fleet
from loadtest.sim.hashing import TOKEN, BlockHash, Chain, Lora, sha256_chain
from loadtest.sim.profile import given
from loadtest.sim.replica import SimSettings
from loadtest.sim.request import Request
from loadtest.sim.scheduler import Limits, Scheduler
from loadtest.sim.tokens import Language
from server.engines.launch import RunningEngine
from server.engines.local import engine_python

ORACLE = Path(__file__).parents[1] / "loadtest" / "sim" / "vllm_scheduler.py"
LORAS = (None, None, None, ("style", "/adapters/style", 1))
SALTS = (None, None, "tenant-a", "tenant-b")

Scenario = dict[str, Any]


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_folder(user_cache(os.environ), converter(Path(engine_python(os.environ))))


def scenario(seed: int, *, size: int, blocks: int, budget: int, seqs: int, steps: int) -> Scenario:
    """Requests of a few families with shared prefixes, more than the pool holds, with aborts and resets in between."""
    rng = random.Random(seed)
    actions: list[list[Any]] = []
    lives: list[str] = []
    most = size * 12
    heads = [[rng.randrange(1000) for _ in range(rng.randrange(1, most // 2))] for _ in range(5)]
    for number in range(steps):
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
            head = rng.choice(heads)
            tokens = head[: rng.randrange(1, len(head) + 1)] + [
                rng.randrange(3) for _ in range(rng.randrange(most // 3))
            ]
            name = f"{number}-{len(lives)}"
            lives.append(name)
            actions.append(["add", name, tokens, rng.randrange(1, 40), rng.choice(SALTS), rng.choice(LORAS)])
        if rng.random() < 0.02:
            actions.append(["reset", rng.random() < 0.5])
        actions.append(["step", [rng.choice(lives[-6:])] if lives and rng.random() < 0.04 else []])
    shape = {"block_size": size, "blocks": blocks, "max_model_len": most, "budget": budget, "seqs": seqs}
    return {**shape, "actions": actions}


def show(event: Event) -> list[Any]:
    wire = to_wire(event)
    kind = type(wire).__name__
    if isinstance(event, Stored):
        return [
            kind,
            wire.block_hashes,
            wire.parent_block_hash,
            list(wire.token_ids),
            wire.block_size,
            wire.lora_name,
            [list(keys) if keys else None for keys in wire.extra_keys] if wire.extra_keys else None,
        ]
    return [kind, wire.block_hashes] if isinstance(event, Removed) else [kind]


def play(asked: Scenario) -> tuple[list[dict[str, Any]], Scheduler]:
    """What vllm_scheduler.py does, with the simulated scheduler."""
    cache = KvCache(asked["blocks"], asked["block_size"], asked["max_model_len"])
    engine = Scheduler(cache, Limits(asked["budget"], asked["seqs"]), lambda request: 1000 + len(request.tokens))
    requests: dict[str, Request] = {}
    results: list[dict[str, Any]] = []
    for action in asked["actions"]:
        if action[0] == "add":
            _, name, tokens, output, salt, lora = action
            adapter = Lora(*lora) if lora else None
            requests[name] = Request(name, tokens, output, asked["block_size"], salt=salt, lora=adapter)
            engine.add(requests[name])
        elif action[0] == "reset":
            results.append({"reset": engine.reset_prefix_cache(reset_running=action[1])})
        else:
            step = engine.schedule()
            for name in action[1]:
                engine.abort(requests[name])
            outputs, events = engine.update(step)
            results.append(
                {
                    "chunks": [[chunk.request.id, chunk.tokens] for chunk in step.chunks],
                    "outputs": [
                        [
                            output.request.id,
                            [output.token],
                            [output.request.cached_tokens, output.request.created_tokens] if output.first else None,
                            output.finish,
                        ]
                        for output in outputs
                    ],
                    "events": [show(event) for event in events],
                    "usage": engine.cache.pool.usage,
                }
            )
    return results, engine


def test_each_step_and_each_event_is_that_of_vllms_own_scheduler(folder: Path) -> None:
    scenarios = [
        scenario(1, size=16, blocks=40, budget=64, seqs=4, steps=600),
        scenario(2, size=16, blocks=30, budget=1000, seqs=16, steps=600),
        scenario(3, size=32, blocks=25, budget=100, seqs=8, steps=600),
        scenario(4, size=16, blocks=200, budget=48, seqs=8, steps=600),
    ]
    environ = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": ""}
    del environ["PYTHONHASHSEED"]
    done = subprocess.run(
        [engine_python(os.environ), str(ORACLE), str(folder)],
        input="".join(json.dumps(one) + "\n" for one in scenarios),
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    steps = events = preemptions = 0
    for asked, line in zip(scenarios, done.stdout.splitlines(), strict=True):
        mine, engine = play(asked)
        for index, (ours, theirs) in enumerate(zip(mine, json.loads(line), strict=True)):
            assert ours == theirs, f"result {index}"
            steps += 1
            events += len(ours.get("events", ()))
        preemptions += engine.preemptions
    print(f"{steps} steps, {events} events, {preemptions} preemptions: all equal")
    assert preemptions > 20
    assert events > 2000


REQUESTS, EARLY, LONG = 200, 60, 12  # the long ones, after the early ones, fill the cache
WORDS = 3000  # ids from 1000 to this many more stand for words, none of which ends an answer


def cache_shape(url: str) -> tuple[int, int]:
    """(blocks, block size) of the engine at this URL, as it reports them."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        families = text_string_to_metric_families(answer.read().decode())
    (labels,) = [s.labels for f in families for s in f.samples if s.name == "vllm:cache_config_info"]
    return int(labels["num_gpu_blocks"]), int(labels["block_size"])


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, list[int]]:
    """Cached tokens and the answer's token ids, once the engine holds nothing any more."""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        done = await response.json()
    return int(done["usage"]["prompt_tokens_details"]["cached_tokens"]), list(done["choices"][0]["token_ids"])


class Tenants:
    """Prompts of three tenants: new conversations that begin with one of four systems' prompts, or old ones that go on."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._salts = [f"sim-{self._random.getrandbits(64):x}-{os.urandom(4).hex()}" for _ in range(3)]
        self._systems = [self._words(200, 600) for _ in range(4)]
        self._talks: list[tuple[str, list[int]]] = []
        self.turns = 0

    def next(self, number: int) -> tuple[str, list[int]]:
        """Salt and prompt of request `number`."""
        rng = self._random
        if EARLY <= number < EARLY + LONG:
            return self._salts[0], self._words(2500, 3500)
        if self._talks and rng.random() < 0.6:
            self.turns += 1
            salt, tokens = self._talks.pop(rng.randrange(len(self._talks)))
        else:
            salt, tokens = rng.choice(self._salts), rng.choice(self._systems)
        return salt, tokens + self._words(40, 200)

    def said(self, number: int, salt: str, tokens: list[int]) -> None:
        """Prompt and answer, which a later prompt may begin with; the long ones are not taken up again."""
        if not EARLY <= number < EARLY + LONG:
            self._talks.append((salt, tokens))

    def _words(self, least: int, below: int) -> list[int]:
        return [1000 + self._random.randrange(WORDS) for _ in range(self._random.randrange(least, below))]


async def test_two_hundred_requests_one_after_the_other_hit_the_same_tokens(
    engine: RunningEngine, folder: Path
) -> None:
    """More than the cache holds: it is filled, and evicts.

    What the engine held before is nobody's here and goes first, in whatever order: a simulator that begins empty is the same.
    """
    blocks, size = cache_shape(engine.url)
    shape = Shape(given(1e7, 1e-5), size, blocks, 8192, Limits(), algorithm="sha256")
    model = Model(engine.model, engine.model, shape.max_model_len, {})
    settings = SimSettings(shape, model, Language.of_folder(folder))
    tenants, results, evicted = Tenants(seed=1), [], 0
    seen: set[BlockHash] = set()  # what a cache without end would hold
    async with Fleet(settings) as fleet, aiohttp.ClientSession() as session:
        simulated = fleet.replicas[0]
        for number in range(REQUESTS):
            salt, prompt = tenants.next(number)
            body = {"model": engine.model, "prompt": prompt, "cache_salt": salt, "max_tokens": 1 + number % 6}
            body |= {"temperature": 0, "return_token_ids": True, "ignore_eos": True}
            hits, answer = await ask(session, engine.url, body)
            mine, same = await ask(session, simulated.url, body | {"sim_output_tokens": answer})
            assert same == answer
            results.append((hits, mine))
            hashes = sha256_chain(Chain(size, 0, None, None, salt), array(TOKEN, prompt + answer[:-1]))
            endless = len(list(takewhile(seen.__contains__, hashes[: (len(prompt) - 1) // size]))) * size
            assert hits <= endless
            evicted += hits < endless
            seen.update(hashes)
            tenants.said(number, salt, prompt + answer)
    assert [mine for _, mine in results] == [hits for hits, _ in results]
    print(f"{sum(h for h, _ in results)} tokens hit; {tenants.turns} went on, {evicted} found less than was stored")
    assert evicted > REQUESTS / 20
    assert tenants.turns > REQUESTS / 4
    assert sum(hits > 0 for hits, _ in results) > REQUESTS / 2
