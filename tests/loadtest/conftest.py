"""Small runs against the fake engine."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from loadtest import result
from loadtest.arms import SaltSource, fresh_salt
from loadtest.client import Target
from loadtest.limits import Limits
from loadtest.outcome import Arm
from loadtest.plan import Plan, Shape, make_plan
from loadtest.run import Run, Runner
from loadtest.schedule import ClosedLoop, Load
from tests.loadtest.cache_engine import CacheEngine

# the fast suite shares its cores: a late client is another test's subject
LENIENT = Limits(send_lag_ms=5000, loop_lag_ms=5000, offered=0.0)


@pytest.fixture
def small_plan() -> Callable[..., Plan]:
    def make(load: Load | None = None, turns: int = 1, unloaded: int = 2, prefix: int = 40) -> Plan:
        return make_plan(
            seed=3,
            load=load or ClosedLoop(4),
            unloaded=Shape(1, unloaded, 1, prefix, 8, 2) if unloaded else None,
            loaded=Shape(2, 3, turns, prefix, 8, 3),
        )

    return make


Measure = Callable[..., Coroutine[Any, Any, tuple[dict[str, Any], Run]]]


@pytest.fixture
def measure() -> Measure:
    """Runs a plan against an engine: the result document and the run."""

    async def go(
        engine: CacheEngine,
        plan: Plan,
        *,
        blocks: Sequence[Arm] = ("off", "on", "on", "off"),
        salts: SaltSource = fresh_salt,
        metrics: bool = True,
        limits: Limits = LENIENT,
        timeout_s: float = 20.0,
    ) -> tuple[dict[str, Any], Run]:
        urls = [engine.metrics_url] if metrics else []
        target = Target(engine.url, timeout_s=timeout_s)
        runner = Runner(
            plan, target, engine_metrics=urls, engine_url=engine.url, blocks=blocks, salts=salts, settle_s=0.01
        )
        run = await runner.run()
        return result.build(run, limits, datetime.now(UTC)), run

    return go
