"""pytest tests/engine/test_sim_against_vllm.py: the simulated engine does what the real one does.

First against vLLM's own scheduler, alone, step by step and event by event, under concurrency and preemption. Then against
the running engine: the same requests, one after the other, must hit the same tokens.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from llm.cache import user_cache
from llm.smollm2 import converter, model_folder
from loadtest.sim.blocks import Event, Removed, Stored
from loadtest.sim.cache import KvCache
from loadtest.sim.events import to_wire
from loadtest.sim.hashing import Lora
from loadtest.sim.request import Request
from loadtest.sim.scheduler import Limits, Scheduler
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
