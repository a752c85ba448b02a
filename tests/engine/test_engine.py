"""pytest tests/engine/test_engine.py: the embedded engine does what the gateway relies on."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import urllib.request
from pathlib import Path
from typing import Any
from uuid import uuid4

from server.engines.launch import RunningEngine
from server.engines.local import engine_python
from tests.server.engines.processes import group_members

BLOCK = 32
READER = Path(__file__).with_name("event_reader.py")


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return bytes(answer.read())


def complete(engine: RunningEngine, prompt: str) -> dict[str, Any]:
    body = {"model": engine.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"{engine.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        usage: dict[str, Any] = json.load(answer)["usage"]
    return usage


def fresh_prompt() -> str:
    """More than two blocks that nobody has sent before."""
    return f"{uuid4()} " + " ".join(f"word {number}" for number in range(40))


def labels(engine: RunningEngine, metric: str) -> dict[str, str]:
    line = next(line for line in get(engine.metrics_url).decode().splitlines() if line.startswith(metric + "{"))
    return dict(re.findall(r'(\w+)="([^"]*)"', line))


def test_it_is_healthy_and_serves_the_embedded_model(engine: RunningEngine) -> None:
    assert engine.alive()
    get(f"{engine.url}/health")
    (model,) = json.loads(get(f"{engine.url}/v1/models"))["data"]
    assert (model["id"], model["max_model_len"]) == ("smollm2", 8192)


def test_its_cache_is_as_the_profile_says(engine: RunningEngine) -> None:
    info = labels(engine, "vllm:cache_config_info")
    assert info["block_size"] == str(BLOCK)
    assert info["enable_prefix_caching"] == "True"
    assert int(info["kv_cache_size_tokens"]) >= 8 * 3_100


def test_a_repeated_prompt_is_cached_in_whole_blocks(engine: RunningEngine) -> None:
    prompt = fresh_prompt()
    first, second = complete(engine, prompt), complete(engine, prompt)
    assert first["prompt_tokens"] == second["prompt_tokens"] > 2 * BLOCK
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == (second["prompt_tokens"] - 1) // BLOCK * BLOCK


def test_events_arrive_over_sockets_that_only_this_user_can_open(engine: RunningEngine) -> None:
    assert engine.events is not None
    folder = Path(engine.events.publish.removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == os.getuid()

    complete(engine, fresh_prompt())
    argv = [engine_python(os.environ), str(READER), engine.events.publish, engine.events.replay, "20"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        past = []
        for line in reader.stdout:
            past.append(json.loads(line))
            if past[-1]["kind"] == "listening":
                break
        complete(engine, fresh_prompt())
        live = json.loads(reader.stdout.readline())

    replayed = [batch for batch in past if batch["kind"] == "replayed"]
    assert [batch["sequence"] for batch in replayed] == list(range(len(replayed)))
    assert live["kind"] == "live"
    assert live["sequence"] == len(replayed)
    (event,) = live["events"]
    assert event["type"] == "BlockStored"
    assert event["block_size"] == BLOCK
    assert event["tokens"] >= 2 * BLOCK


def test_it_is_three_processes_of_one_group(engine: RunningEngine) -> None:
    members = group_members(engine.pid)
    assert len([args for args in members if args.startswith("VLLM::") or "api_server" in args]) == 3
