"""A short load test against the real engine: the counters, the usage and the salts of a true vLLM."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import jsonschema
import orjson
import pytest

from loadtest import report, result
from loadtest.client import Target
from loadtest.limits import Limits
from loadtest.plan import Shape, make_plan
from loadtest.run import Runner
from loadtest.schedule import ClosedLoop
from server.engines.launch import RunningEngine

pytestmark = pytest.mark.engine
SCHEMA = Path(__file__).parents[2] / "docs" / "loadtest-result.schema.json"

# other tests share the cores: how late the client is says nothing here
LIMITS = Limits(send_lag_ms=10_000, loop_lag_ms=10_000)


async def test_a_short_run_is_valid_and_exact(engine: RunningEngine) -> None:
    plan = make_plan(
        seed=5,
        load=ClosedLoop(3),
        unloaded=Shape(1, 2, 1, 320, 16, 4),
        loaded=Shape(2, 2, 2, 224, 24, 6),
    )
    runner = Runner(
        plan, Target(engine.url, engine.model), engine_metrics=[engine.metrics_url], blocks=("off", "on", "on", "off")
    )
    run = await runner.run()
    document = result.build(run, LIMITS, datetime.now(UTC))
    assert document["valid"], document["reasons"]
    assert document["cached_tokens"]["ratio"] == 1.0
    assert document["loaded"]["off"]["cached_tokens"]["delivered"] == 0
    assert document["engine"]["version"]
    assert document["engine"]["block_size"] == 32
    assert document["engine"]["kv_tokens"] > 0
    assert document["unloaded"]["ttft_reduction"] > 0
    jsonschema.validate(
        orjson.loads(result.to_bytes(document)), orjson.loads(SCHEMA.read_bytes()), jsonschema.Draft202012Validator
    )
    assert "VALID" in report.render(document, run)
