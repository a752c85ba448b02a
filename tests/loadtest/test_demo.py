"""`kvgate demo` with a real gateway process and a fake engine. The real engine's turn is tests/engine."""

from __future__ import annotations

import asyncio
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import orjson
import pytest

from kvgate.cli import main
from kvgate.commands import demo
from kvgate.errors import SetupError
from loadtest.limits import Limits
from loadtest.plan import Shape
from server.engines.launch import RunningEngine
from tests.loadtest.cache_engine import MODEL, CacheEngine


class ThreadedEngine:
    """The fake engine with a loop of its own, with what the demo uses of a RunningEngine."""

    def __init__(self) -> None:
        self.fake, self.model, self.events = CacheEngine(block_size=32), MODEL, None
        self.dead = self.stopped = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    @property
    def url(self) -> str:
        return self.fake.url

    @property
    def metrics_url(self) -> str:
        return "http://127.0.0.1:9/metrics" if self.dead else self.fake.metrics_url

    def alive(self) -> bool:
        return not self.dead

    def exit_text(self) -> str:
        return "killed by SIGKILL"

    def __enter__(self) -> ThreadedEngine:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.fake.__aenter__(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self.fake.__aexit__(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.stopped = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ThreadedEngine:
    made = ThreadedEngine()
    monkeypatch.setattr(demo, "start_engine", lambda *_, **__: made)
    monkeypatch.setattr(demo, "Limits", lambda: Limits(send_lag_ms=5000, loop_lag_ms=5000))
    monkeypatch.setattr(demo, "LOADED", Shape(2, 3, 1, 96, 8, 3))
    return made


@pytest.fixture
def gateways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of the gateways that the demo started."""
    urls: list[str] = []
    real = demo.gateway

    @contextmanager
    def watched(engine: RunningEngine, log: Path) -> Iterator[str]:
        with real(engine, log) as url:
            urls.append(url)
            yield url

    monkeypatch.setattr(demo, "gateway", watched)
    return urls


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health/live", timeout=2.0):
            return True
    except (urllib.error.URLError, OSError):
        return False


def test_the_demo_measures_through_the_gateway_and_stops_it(
    engine: ThreadedEngine, gateways: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["demo", "--out", str(tmp_path)])
    shown = capsys.readouterr()
    document = orjson.loads((tmp_path / "result.json").read_bytes())
    assert code == 0, document["reasons"]
    assert shown.out.startswith("VALID")
    assert document["cached_tokens"]["ratio"] == 1.0
    assert document["unloaded"]["pairs"] >= 5
    assert {"gateway.log", "plan.jsonl", "report.html", "samples.jsonl"} <= {p.name for p in tmp_path.iterdir()}
    assert engine.stopped
    assert len(gateways) == 1
    assert not answers(gateways[0])


def test_an_engine_that_dies_is_named_and_no_older_verdict_stays(
    engine: ThreadedEngine, gateways: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "result.json").write_text('{"valid": true}')
    engine.dead = True
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "the engine ended during the load test, killed by SIGKILL" in capsys.readouterr().err
    assert not (tmp_path / "result.json").exists()
    assert engine.stopped
    assert not answers(gateways[0])


def test_a_gateway_that_does_not_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(SetupError, match="the gateway ended with exit status 2") as caught,
        demo.gateway(cast("RunningEngine", SimpleNamespace(url="not a url", events=None)), tmp_path / "gateway.log"),
    ):
        pass
    assert "gateway.log" in str(caught.value)


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ((48, 48, 48, None), "announced = predicted = delivered = 48 tokens"),
        ((None, None, 48, None), "delivered 48 tokens; what it holds is inferred, having no KV events"),
        ((48, 48, 0, "prefix caching is off"), "prefix caching is off"),
    ],
)
def test_a_verdict_in_words(verdict: tuple[object, ...], words: str) -> None:
    names = ("announced_tokens", "predicted_tokens", "delivered_tokens", "problem")
    assert demo.self_test_words(dict(zip(names, verdict, strict=True))) == words


def test_the_ledger_in_a_sentence() -> None:
    row = {"prompt_tokens": 1200, "available_tokens": 1000, "routed_tokens": 900, "delivered_tokens": 800}
    line = demo.ledger_line({"rows": [row, row]})
    assert line == "ledger: of 2,400 prompt tokens 2,000 could have hit, 1,800 were routed to hit, 1,600 hit"
    assert "no prompt" in demo.ledger_line({"rows": []})


def test_a_gateway_that_has_gone_is_told_in_a_sentence() -> None:
    with pytest.raises(SetupError, match="did not answer"):
        demo._get("http://127.0.0.1:9", "/kv/ledger")
