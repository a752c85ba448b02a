"""python -m bench sim: CPU that the simulated engine takes for a long prompt given as token ids, from its body to its last event.

    python -m bench sim calibrate URL MODEL

measures how long a running engine takes, and fits the profile of loadtest/sim/profile.py to it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import platform
import random
import statistics
import time
import urllib.request
from typing import Any

import msgspec
import numpy as np

from loadtest.sim import asks
from loadtest.sim.asks import Model
from loadtest.sim.cache import KvCache
from loadtest.sim.events import KVEventBatch, to_wire
from loadtest.sim.hashing import ALGORITHMS
from loadtest.sim.request import Request
from loadtest.sim.scheduler import Limits, Scheduler
from loadtest.sim.text import Writer
from loadtest.sim.tokens import Language

TOKENS = 100_000
LIMIT_MS = 5.0
REPEAT = 9


def prompt_bodies(blocks: int, rng: random.Random) -> list[bytes]:
    """Bodies that share their first half."""
    half = [rng.randrange(50_000) for _ in range(TOKENS // 2)]
    bodies = []
    for _ in range(blocks):
        tail = [rng.randrange(50_000) for _ in range(TOKENS // 2)]
        bodies.append(json.dumps({"prompt": half + tail, "max_tokens": 1, "ignore_eos": True}).encode())
    return bodies


def answer_cpu_ms(size: int, algorithm: str, *, full: bool) -> list[tuple[float, float, float]]:
    """CPU in ms of each body: to read and check it; to hash, admit, step and free its request; to write its events.

    full: the cache has room for two prompts, so that each evicts what it takes; else it has room for all.
    """
    language = Language.toy()
    bodies = prompt_bodies(REPEAT + 3, random.Random(1))
    blocks = (2 if full else len(bodies) + 1) * TOKENS // size + 10
    writers: dict[Request, Writer] = {}
    scheduler = Scheduler(KvCache(blocks, size, TOKENS + 100), Limits(8192, 256), lambda one: writers[one].next())
    model = Model("toy", "toy", TOKENS + 100, {})
    encode = msgspec.msgpack.Encoder().encode
    taken = []
    for body in bodies:
        gc.collect()
        begin = time.thread_time()
        parsed = asks.parse(body)
        (tokens,) = asks.completion_prompts(parsed, language.coder.vocabulary)
        assert not isinstance(tokens, str)
        ask = asks.generation(parsed, [tokens], model, chat=False, session=None)
        read = time.thread_time()
        request = Request("r", ask.prompts[0], 1, size, hashing=ALGORITHMS[algorithm])
        writers = {request: Writer(language.words, tokens)}
        scheduler.add(request)
        told = []
        while scheduler.busy:
            told.append(scheduler.update(scheduler.schedule())[1])
        computed = time.thread_time()
        for events in told:
            encode(KVEventBatch(0.0, [to_wire(event) for event in events], 0))
        taken.append((1000 * (read - begin), 1000 * (computed - read), 1000 * (time.thread_time() - computed)))
    return taken[3:]


def table() -> int:
    gc.freeze()
    met = True
    print(f"CPU in ms, median, of a prompt of {TOKENS:,} token ids, half of it a hit; {platform.machine()}")
    print("| block | hash | cache | body | engine | events |\n|---|---|---|---|---|---|")
    for size, algorithm, full in ((16, "fast", False), (16, "fast", True), (64, "fast", True), (16, "sha256", True)):
        body, engine, events = (
            statistics.median(part) for part in zip(*answer_cpu_ms(size, algorithm, full=full), strict=True)
        )
        shown = "evicts" if full else "has room"
        print(f"| {size} | {algorithm} | {shown} | {body:.1f} | {engine:.1f} | {events:.1f} |")
        met = met and (algorithm != "fast" or engine <= LIMIT_MS)
    print(f"{'pass' if met else 'FAIL'}: with the fast hash the engine takes at most {LIMIT_MS:g} ms")
    return 0 if met else 1


class Probe:
    """Times answers of a running engine, each prompt new."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        self._random = random.Random(time.time_ns())

    def _body(self, tokens: int, output: int) -> bytes:
        prompt = [1000 + self._random.randrange(3000) for _ in range(tokens)]
        body = {"model": self._model, "prompt": prompt, "max_tokens": output, "ignore_eos": True}
        return json.dumps(body).encode()

    def _post(self, body: bytes) -> float:
        begin = time.perf_counter()
        asked = urllib.request.Request(f"{self._url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked) as answer:
            answer.read()
        return time.perf_counter() - begin

    def prefill(self, tokens: int) -> float:
        """Seconds to a first token, the best of three."""
        return min(self._post(self._body(tokens, 1)) for _ in range(3))

    def decode(self, sequences: int, context: int, output: int = 24) -> float:
        """Seconds of a step with so many sequences of so many tokens: what more steps add."""

        async def together(tokens: int) -> float:
            begin = time.perf_counter()
            bodies = [self._body(context, tokens) for _ in range(sequences)]
            await asyncio.gather(*(asyncio.to_thread(self._post, body) for body in bodies))
            return time.perf_counter() - begin

        return min((asyncio.run(together(output + 1)) - asyncio.run(together(1))) / output for _ in range(2))


def fit(rows: list[tuple[list[float], float]]) -> list[float]:
    """Least squares of the relative error, nothing below zero."""
    names = range(len(rows[0][0]))
    kept = list(names)
    while True:
        matrix = np.array([[row[0][name] / row[1] for name in kept] for row in rows])
        solution = np.linalg.lstsq(matrix, np.ones(len(rows)), rcond=None)[0]
        if (solution >= 0).all():
            return [float(solution[kept.index(name)]) if name in kept else 0.0 for name in names]
        kept = [name for name, value in zip(kept, solution, strict=True) if value >= 0]


def calibrate(url: str, model: str) -> int:
    probe = Probe(url, model)
    prefills = [(tokens, probe.prefill(tokens)) for tokens in (128, 256, 512, 1024, 1536, 2048)]
    decodes = [
        (n, context, probe.decode(n, context)) for n, context in ((1, 64), (1, 2000), (4, 64), (4, 1500), (16, 64))
    ]
    for tokens, seconds in prefills:
        print(f"prefill of {tokens} tokens: {seconds:.3f} s")
    for n, context, seconds in decodes:
        print(f"step of {n} sequences of {context} tokens: {1000 * seconds:.1f} ms")
    step, token, pair = fit([([1, tokens, tokens * (tokens + 1) / 2], seconds) for tokens, seconds in prefills])
    weights, context_token = fit([([1, n * context], seconds) for n, context, seconds in decodes])
    print(
        f"step_s={step:.4f} token_s={token:.6f} attention_s={pair:.3g} weights_s={weights:.4f} kv_s={context_token:.3g}"
    )
    return 0


def main(words: list[str]) -> int:
    parse = argparse.ArgumentParser(prog="python -m bench sim", description=__doc__)
    parse.add_argument("what", nargs="*", metavar="calibrate URL MODEL")
    given: Any = parse.parse_args(words).what
    if not given:
        return table()
    if len(given) != 3 or given[0] != "calibrate":
        parse.error("say nothing, or calibrate URL MODEL")
    return calibrate(given[1], given[2])
