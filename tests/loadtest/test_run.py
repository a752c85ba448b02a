"""Whole runs over real sockets. Each fault is a trap that existing load tests fall into; here it must end in INVALID."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest

from kvgate.errors import SetupError, UsageError
from loadtest import report, result, table
from loadtest.arms import blocks_of, fresh_salt
from loadtest.client import Target
from loadtest.engine import EngineFacts
from loadtest.gates import judge
from loadtest.limits import Limits
from loadtest.plan import Plan, Shape, make_plan
from loadtest.run import Run, Runner
from loadtest.schedule import ClosedLoop, OpenLoop
from tests.loadtest.cache_engine import CacheEngine, Faults
from tests.loadtest.conftest import Measure

MakePlan = Callable[..., Plan]


def failed(document: dict[str, Any]) -> set[str]:
    return {gate["name"] for gate in document["gates"] if gate["status"] == "fail"}


async def test_an_honest_run_is_valid_and_exact(measure: Measure, small_plan: MakePlan) -> None:
    async with CacheEngine() as engine:
        document, run = await measure(engine, small_plan())
    assert document["valid"], document["reasons"]
    assert document["reasons"] == []
    assert document["engine"]["version"] == "0.32.0"
    assert (document["engine"]["block_size"], document["engine"]["kv_tokens"]) == (16, 46592)
    # two on-blocks of six requests, 40 shared tokens are two blocks of 16
    assert document["cached_tokens"] == {"ceiling": 12 * 32, "delivered": 12 * 32, "ratio": 1.0}
    assert document["loaded"]["off"]["cached_tokens"]["delivered"] == 0
    assert document["loaded"]["order"] == ["off", "on", "on", "off"]
    assert document["unloaded"]["pairs"] == 2
    assert document["loaded"]["on"]["results"]["ok"] == 12
    assert [o.arm for o in run.blocks[0].outcomes] == ["off", "on", "on", "off"], "cold first, then warm first"


async def test_the_key_goes_to_the_target_alone(small_plan: MakePlan) -> None:
    async with CacheEngine() as engine:
        target = Target(engine.url, api_key="k1")
        runner = Runner(small_plan(unloaded=0), target, engine_metrics=[engine.metrics_url], settle_s=0.01)
        await runner.run()
        assert engine.keys == {"Bearer k1"}


async def test_turns_reuse_the_turn_before(measure: Measure, small_plan: MakePlan) -> None:
    async with CacheEngine() as engine:
        document, _ = await measure(engine, small_plan(turns=3))
    assert document["valid"], document["reasons"]
    assert document["cached_tokens"]["ratio"] == 1.0
    assert document["cached_tokens"]["ceiling"] > 3 * 12 * 32


async def test_both_arms_send_the_same_bytes_but_for_the_salt(measure: Measure, small_plan: MakePlan) -> None:
    async with CacheEngine() as engine:
        _, run = await measure(engine, small_plan(unloaded=0))
        bodies = engine.bodies
    planned = [b for b in bodies if b["max_tokens"] > 1]
    arms = [planned[0:6], planned[6:12], planned[12:18], planned[18:24]]
    salts = [{b["cache_salt"] for b in arm} for arm in arms]
    assert [len(s) for s in salts] == [6, 1, 1, 6]
    assert salts[1] != salts[2], "each block of time starts cold"

    def stripped(arm: list[dict[str, Any]]) -> list[bytes]:
        return sorted(orjson.dumps({k: v for k, v in b.items() if k != "cache_salt"}) for b in arm)

    assert stripped(arms[0]) == stripped(arms[1]) == stripped(arms[2]) == stripped(arms[3])
    assert all(b["ignore_eos"] and b["min_tokens"] == b["max_tokens"] and b["temperature"] == 0 for b in bodies)
    assert run.arms == ("off", "on")


async def test_the_same_seed_again_starts_cold(measure: Measure, small_plan: MakePlan) -> None:
    """A second run of the same plan on the same engine: the illusion of fixed seeds."""
    async with CacheEngine() as engine:
        first, _ = await measure(engine, small_plan())
        second, _ = await measure(engine, small_plan())
    assert first["valid"]
    assert second["valid"]
    assert first["workload"] == second["workload"]
    assert first["cached_tokens"] == second["cached_tokens"]


async def test_a_warm_cache_is_caught_by_the_canary(measure: Measure, small_plan: MakePlan) -> None:
    async with CacheEngine() as engine:
        document, _ = await measure(engine, small_plan(unloaded=0), blocks=("on", "on"), salts=lambda: "ab" * 16)
    assert not document["valid"]
    assert failed(document) == {"canary_cold"}
    assert any("the cache was warm" in reason for reason in document["reasons"])


@pytest.mark.parametrize(
    ("faults", "gates"),
    [
        (Faults(drop_salt=True), {"canary_cold", "off_arm_cold"}),
        (Faults(no_reuse=True), {"canary_warm"}),
        (Faults(hide_cached=True), {"canary_cold", "canary_warm", "cached_tokens_known", "truth"}),
        (Faults(prompt_off_by=1), {"token_exactness", "truth"}),
        (Faults(output_off_by=-1), {"token_exactness"}),
        (Faults(extra_cached=16), {"canary_cold", "off_arm_cold", "contamination"}),
        (Faults(counter_off_by=16), {"truth"}),
        (Faults(no_done=True, only_every=5), {"errors"}),
        (Faults(break_after=1, only_every=5), {"errors"}),
        (Faults(error_event=True, only_every=5), {"errors"}),
        (Faults(status=503, only_every=5), {"errors"}),
    ],
    ids=lambda value: "" if isinstance(value, set) else repr(value)[7:60],
)
async def test_each_lie_is_noticed(measure: Measure, small_plan: MakePlan, faults: Faults, gates: set[str]) -> None:
    async with CacheEngine(faults=faults) as engine:
        document, _ = await measure(engine, small_plan())
    assert not document["valid"]
    assert failed(document) >= gates, document["reasons"]
    if faults.only_every == 1:
        assert failed(document) == gates | (failed(document) & {"contamination"}), document["reasons"]


async def test_unknown_cached_tokens_are_null_and_not_zero(measure: Measure, small_plan: MakePlan) -> None:
    async with CacheEngine(faults=Faults(hide_cached=True)) as engine:
        document, _ = await measure(engine, small_plan())
    assert document["cached_tokens"]["delivered"] is None
    assert document["cached_tokens"]["ratio"] is None


async def test_failed_requests_stay_in_the_counts(measure: Measure, small_plan: MakePlan) -> None:
    async with CacheEngine(faults=Faults(no_done=True, only_every=3)) as engine:
        document, run = await measure(engine, small_plan(unloaded=0))
    classes = [document["loaded"][arm]["results"] for arm in ("off", "on")]
    assert sum(c["ok"] + c["broken_stream"] for c in classes) == 24
    assert sum(c["broken_stream"] for c in classes) == sum(not o.ok for b in run.blocks for o in b.outcomes) > 0
    assert document["loaded"]["off"]["success_rate"] < 1


async def test_without_the_engines_counters_nothing_is_vouched_for(measure: Measure, small_plan: MakePlan) -> None:
    async with CacheEngine() as engine:
        document, _ = await measure(engine, small_plan(), metrics=False)
    assert failed(document) == {"truth"}
    assert document["engine"]["block_size"] is None
    assert document["cached_tokens"]["ceiling"] is None


async def test_past_its_capacity_an_open_loop_claims_no_ratio(measure: Measure) -> None:
    plan = make_plan(seed=1, load=OpenLoop("constant", 300.0), unloaded=None, loaded=Shape(2, 30, 1, 64, 8, 2))
    async with CacheEngine(slots=1, prefill_s_per_token=0.0002) as engine:
        document, _ = await measure(engine, plan, blocks=("off", "on"))
    assert "stationarity" in failed(document)
    assert document["loaded"]["ttft_gain"] is None
    assert any(text.startswith("loaded.ttft_gain") for text in document["withheld"])


async def test_a_steady_open_loop_is_valid(measure: Measure) -> None:
    plan = make_plan(seed=1, load=OpenLoop("poisson", 60.0), unloaded=None, loaded=Shape(2, 12, 1, 64, 8, 2))
    async with CacheEngine() as engine:
        document, run = await measure(engine, plan, blocks=("off", "on"))
    assert document["valid"], document["reasons"]
    planned = [[o.planned_ns - b.start_ns for o in b.outcomes] for b in run.blocks]
    assert planned[0] == planned[1] == [r.at_ns for r in plan.requests]


async def test_a_request_that_takes_too_long_is_a_timeout(measure: Measure, small_plan: MakePlan) -> None:
    async with CacheEngine(token_s=0.4) as engine:
        document, _ = await measure(engine, small_plan(unloaded=0), blocks=("off",), timeout_s=0.5)
    assert document["loaded"]["off"]["results"]["timeout"] == 6
    assert "errors" in failed(document)
    assert document["loaded"]["on"] is None


async def test_what_cannot_work_is_refused_before_the_run(small_plan: MakePlan) -> None:
    async with CacheEngine(max_model_len=30) as engine:
        with pytest.raises(UsageError, match="--unloaded-prefix-tokens 40"):
            await Runner(small_plan(), Target(engine.url)).run()
    async with CacheEngine() as engine:
        with pytest.raises(UsageError, match="--model other"):
            await Runner(small_plan(), Target(engine.url, "other")).run()
        gone = engine.url
    with pytest.raises(SetupError, match="--url"):
        await Runner(small_plan(), Target(gone)).run()
    async with CacheEngine(metrics_on=False) as engine:
        with pytest.raises(SetupError, match="--engine-metrics"):
            await Runner(small_plan(), Target(engine.url), engine_metrics=[engine.metrics_url]).run()


def test_salts_are_fresh_and_fit_the_engine() -> None:
    salts = {fresh_salt() for _ in range(100)}
    assert len(salts) == 100
    assert all(len(s) == 32 and int(s, 16) >= 0 for s in salts)


def test_orders() -> None:
    assert blocks_of(("off", "on"), "ABBA") == ("off", "on", "on", "off")
    assert blocks_of(("on",), "AA") == ("on", "on")
    for wrong in ("", "ABC", "AA"):
        with pytest.raises(ValueError, match="order"):
            blocks_of(("off", "on"), wrong)


async def test_results_follow_the_published_schema(measure: Measure, small_plan: MakePlan) -> None:
    schema = orjson.loads((Path(__file__).parents[2] / "docs" / "loadtest-result.schema.json").read_bytes())
    jsonschema.Draft202012Validator.check_schema(schema)
    async with CacheEngine() as engine:
        full, _ = await measure(engine, small_plan())
        part, _ = await measure(engine, small_plan(unloaded=0), blocks=("on",), metrics=False)
    for document in (full, part):
        jsonschema.validate(orjson.loads(result.to_bytes(document)), schema, jsonschema.Draft202012Validator)


async def test_the_report_stands_alone_and_says_the_verdict_first(measure: Measure, small_plan: MakePlan) -> None:
    async with CacheEngine() as engine:
        good, run = await measure(engine, small_plan())
        engine.faults = Faults(counter_off_by=16)
        bad, bad_run = await measure(engine, small_plan())
    page, bad_page = report.render(good, run), report.render(bad, bad_run)
    for text in (page, bad_page):
        assert not re.search(r"(src|href)=|https?:|@import|url\(|<script", text)
    assert page.index("VALID") < page.index("class='card'")
    assert "Do not use the numbers" in bad_page
    assert page.count("<svg") == 5
    shown = table.render(good)
    assert shown.startswith("VALID")
    assert "(max)" in shown
    assert table.render(bad).startswith("INVALID")


def test_the_documentation_names_each_gate() -> None:
    text = (Path(__file__).parents[2] / "docs" / "loadtest.md").read_text()
    named = re.findall(r"^\| `(\w+)` \| (?!one|the num)", text, re.MULTILINE)
    empty = Run(make_plan(seed=0, load=ClosedLoop(1), unloaded=None, loaded=None), FACTS, (), (), ())
    assert named == [gate.name for gate in judge(empty, Limits())]


FACTS = EngineFacts(None, "m", None, None, None, 0)
