"""A small, quick fleet for tests, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from loadtest.sim.asks import Model
from loadtest.sim.engine import Shape
from loadtest.sim.hashing import Lora
from loadtest.sim.profile import given
from loadtest.sim.replica import SimSettings
from loadtest.sim.scheduler import Limits
from loadtest.sim.tokens import Language

SIZE = 16
LANGUAGE = Language.toy()
LORA = Lora("style", "/adapters/style", 1)


def settings(*, blocks: int = 200, prefill: float = 1e6, decode_s: float = 0.0002, **more: Any) -> SimSettings:
    """blocks of 16 tokens."""
    limits = Limits(2048, 16)
    shape = Shape(given(prefill, decode_s), SIZE, blocks, (blocks - 1) * SIZE, limits)
    shape = replace(shape, **{name: more.pop(name) for name in ("prefix_caching", "algorithm") if name in more})
    model = Model("toy", "/models/toy", shape.max_model_len, {LORA.name: LORA})
    return SimSettings(shape, model, LANGUAGE, **more)


async def complete(url: str, prompt: Any, **more: Any) -> dict[str, Any]:
    """A completion, whole."""
    async with aiohttp.ClientSession() as session:
        body = {"prompt": prompt, "max_tokens": 4, **more}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            done: dict[str, Any] = await response.json()
            return done


async def cached(url: str, prompt: Any, **more: Any) -> int:
    usage = (await complete(url, prompt, **more))["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


async def get(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200, await response.text()
        return await response.text()


async def post(url: str, body: Any = None) -> tuple[int, Any]:
    """Status and JSON."""
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        return response.status, await response.json()


async def metric(url: str, name: str, **labels: str) -> float:
    """The value of one series, of which there is exactly one."""
    families = text_string_to_metric_families(await get(f"{url}/metrics"))
    (value,) = [
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return float(value)


async def until(true: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Waits for something that will happen; the limit only ends a test that has failed."""
    async with asyncio.timeout(limit_s):
        while not true():
            await asyncio.sleep(0.002)
