"""`kvgate demo`: the whole story on this machine. A real engine, the gateway before it, and a load test through both
with prefix caching off and on; then a report. It stops what it started, however it ends."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvgate.commands.interrupt import sigterm_interrupts
from kvgate.commands.loadtest import execute, make_folder
from kvgate.errors import SetupError
from loadtest.client import Target
from loadtest.limits import Limits
from loadtest.outcome import Arm
from loadtest.plan import Plan, Shape, make_plan
from loadtest.progress import Progress
from loadtest.run import Runner
from loadtest.schedule import ClosedLoop
from server.engines.launch import RunningEngine, free_port
from server.engines.local import EngineRequest, start_engine
from server.engines.log import log_tail
from server.engines.progress import StartProgress

ORDER: tuple[Arm, ...] = ("off", "on", "on", "off")
IN_FLIGHT = 8
READY_SECONDS = 60.0
SELF_TEST_SECONDS = 60.0
DRAIN_SECONDS = 10.0

# One request at a time: a prefix of about 3,000 tokens, whole in blocks of 32 as well as of 16
UNLOADED = Shape(groups=1, sessions=7, turns=1, prefix_tokens=3008, suffix_tokens=16, output_tokens=4)
# Under load: two system prompts of 1,536 tokens that many short questions share
LOADED = Shape(groups=2, sessions=10, turns=1, prefix_tokens=1536, suffix_tokens=32, output_tokens=24)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="the main job on this machine: engine, gateway, load test, report",
        description=f"{__doc__} Exit 0 only when the result is VALID.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder of the results (default: out/demo)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    out: Path = args.out
    make_folder(out)
    progress, began = Progress.on_stderr(), time.monotonic()
    with (
        sigterm_interrupts(),
        start_engine(
            EngineRequest(profile="cpu"),
            log_path=out / "engine.log",
            progress=StartProgress(sys.stderr, "engine"),
        ) as engine,
        gateway(engine, out / "gateway.log") as url,
    ):
        progress.note(f"gateway: {url} before {engine.model} on {engine.url}")
        progress.note(_self_test(url))  # its requests to the engine must be over before counters are read
        plan = demo_plan()
        runner = Runner(
            plan,
            Target(url, engine.model),
            engine_metrics=[engine.metrics_url],
            engine_url=engine.url,
            blocks=ORDER,
            progress=progress,
        )
        try:
            code = execute(runner, plan, Limits(), out, as_json=args.json)
        except SetupError as error:
            if engine.alive():
                raise
            raise SetupError(f"the engine ended during the load test, {engine.exit_text()}") from error
        ledger = _get(url, "/kv/ledger")
        (out / "ledger.json").write_text(json.dumps(ledger, indent=2) + "\n")
        progress.note(ledger_line(ledger))
    progress.note(f"demo: {time.monotonic() - began:.0f} s in all (measured); engine and gateway are stopped")
    return code


def demo_plan() -> Plan:
    return make_plan(seed=0, load=ClosedLoop(IN_FLIGHT), unloaded=UNLOADED, loaded=LOADED)


@contextmanager
def gateway(engine: RunningEngine, log: Path) -> Iterator[str]:
    """A gateway before the engine, as a process of its own; its base URL once it is ready. SIGTERM at the end."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "kvgate", "serve", "--engine", engine.url, "--port", str(port)]
    if engine.events is not None:
        command += ["--kv-events", f"{engine.url.removeprefix('http://')}={engine.events.setting()}"]
    # settings of the user's shell, such as a host or a key file, are for their gateway and not for this one
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
    with log.open("wb") as stream:
        # a session of its own: a terminal's Ctrl-C reaches the demo alone, which then stops its parts in order
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environ, start_new_session=True
        )
        try:
            _wait_ready(process, url, log)
            yield url
        finally:
            _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not _ready(url):
        if process.poll() is not None:
            raise _failure(f"the gateway ended with exit status {process.returncode} before it was ready", log)
        if time.monotonic() > deadline:
            raise _failure(f"the gateway was not ready within {READY_SECONDS:g} s", log)
        time.sleep(0.1)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=2.0) as answer:  # noqa: S310 - http, built here
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except OSError:
        return False


def _get(url: str, path: str) -> dict[str, Any]:
    """What the gateway says of itself."""
    try:
        with urllib.request.urlopen(url + path, timeout=10.0) as answer:  # noqa: S310 - http, built here
            body: dict[str, Any] = json.load(answer)
    except OSError as error:
        raise SetupError(f"the gateway did not answer {path} ({error}): see gateway.log") from error
    return body


def _self_test(url: str) -> str:
    """What the gateway's test of the engine gave, once it is over."""
    deadline = time.monotonic() + SELF_TEST_SECONDS
    while (verdict := _get(url, "/kv/replicas")["replicas"][0]["self_test"]) is None:
        if time.monotonic() > deadline:
            raise SetupError(f"the gateway did not test the engine within {SELF_TEST_SECONDS:g} s: see gateway.log")
        time.sleep(0.1)
    return f"self-test: {self_test_words(verdict)}"


def self_test_words(verdict: dict[str, Any]) -> str:
    """Of an engine's `self_test` in /kv/replicas."""
    delivered = verdict["delivered_tokens"]
    if verdict["problem"]:
        return str(verdict["problem"])
    if verdict["announced_tokens"] is None:
        return f"delivered {delivered} tokens; what it holds is inferred, having no KV events"
    return f"announced = predicted = delivered = {delivered} tokens"


def ledger_line(ledger: dict[str, Any]) -> str:
    """Of /kv/ledger, in a sentence."""
    names = ("prompt", "available", "routed", "delivered")
    prompt, *held = (sum(row[f"{name}_tokens"] for row in ledger["rows"]) for name in names)
    if not prompt:
        return "ledger: no prompt could be matched, so nothing was predicted"
    could, routed, hit = (f"{n:,}" for n in held)
    return f"ledger: of {prompt:,} prompt tokens {could} could have hit, {routed} were routed to hit, {hit} hit"


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(DRAIN_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _failure(sentence: str, log: Path) -> SetupError:
    return SetupError("\n".join([f"{sentence}: see the end of {log}", *log_tail(log)]))
