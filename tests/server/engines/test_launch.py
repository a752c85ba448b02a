"""pytest tests/server/engines/test_launch.py: an engine serves, or one sentence says why not; nothing of it stays."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kvgate.errors import SetupError
from server.engines.launch import RunningEngine, free_port, launch
from server.engines.profiles import EngineCommand, EngineSpec, EventEndpoints
from server.engines.progress import StartProgress
from tests.server.engines.processes import eventually, running

FAKE = Path(__file__).with_name("fake_engine.py")
ROOT = Path(__file__).parents[3]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Fake:
    """Starts the fake engine on a free port."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "logs" / "engine.log"
        self.shown = io.StringIO()
        self.port = free_port()
        self.events_folder = folder / "sockets"
        self.events_folder.mkdir()

    def start(self, behaviour: str, start_seconds: float = 30.0, shown: io.StringIO | None = None) -> RunningEngine:
        events = EventEndpoints.in_folder(str(self.events_folder))
        spec = EngineSpec(profile="cpu", model="/m", served_name="smollm2", port=self.port, events=events)
        command = EngineCommand((sys.executable, str(FAKE), str(self.port), behaviour), {"FAKE_FLAG": "1"})
        progress = StartProgress(self.shown if shown is None else shown, "engine")
        return launch(command, spec, self.log, progress, start_seconds=start_seconds, events_folder=self.events_folder)

    def child(self) -> int:
        match = re.search(r"child (\d+)", self.log.read_text())
        assert match is not None
        return int(match[1])


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def test_serves_and_stops_whole(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TOKEN", "from the caller")
    with fake.start("serve") as engine:
        assert engine.alive()
        assert engine.url == f"http://127.0.0.1:{fake.port}"
        assert engine.metrics_url == f"{engine.url}/metrics"
        assert engine.model == "smollm2"
        assert engine.events == EventEndpoints.in_folder(str(fake.events_folder))
        assert os.getpgid(engine.pid) == engine.pid != os.getpgid(0)
        assert os.getsid(engine.pid) != os.getsid(0)
        child = fake.child()
        assert running(child)
        assert "TOKEN=from the caller FLAG=1" in fake.log.read_text()
        assert fake.log.stat().st_mode & 0o777 == 0o600
    assert not engine.alive()
    assert not running(child)
    assert not fake.events_folder.exists()
    assert f"serving smollm2 on {engine.url}" in fake.shown.getvalue()
    engine.stop()  # a second time is harmless


def test_an_engine_that_ignores_sigterm_is_killed(fake: Fake) -> None:
    engine = fake.start("deaf")
    child = fake.child()
    started = time.monotonic()
    engine.stop(seconds=0.5)
    assert time.monotonic() - started < 5
    assert not engine.alive()
    assert not running(child)


def test_a_dead_start_names_the_status_the_cause_and_the_last_lines(fake: Fake) -> None:
    with pytest.raises(SetupError) as raised:
        fake.start("die")
    first, *rest = str(raised.value).split("\n")
    assert first == f"the engine ended before it served, exit status 3: see the end of {fake.log}"
    assert rest[:2] == ["  ValueError: the cause, far from the end", "  ..."]
    assert rest[-1] == "  traceback line 39"
    assert not fake.events_folder.exists()


def test_a_missing_program_is_named(fake: Fake) -> None:
    spec = EngineSpec(profile="gpu", model="m", served_name="m", port=fake.port)
    with pytest.raises(SetupError, match="no-such-vllm cannot be run: No such file"):
        launch(EngineCommand(("no-such-vllm",), {}), spec, fake.log, StartProgress(fake.shown, "engine"))


def test_a_taken_port_is_refused_before_anything_starts(fake: Fake) -> None:
    with socket.create_server(("127.0.0.1", fake.port)), pytest.raises(SetupError, match=f"port {fake.port} .*in use"):
        fake.start("serve")
    assert not fake.log.exists()
    assert not fake.events_folder.exists()


def test_a_log_that_cannot_be_written_is_named(fake: Fake) -> None:
    fake.log.parent.write_text("a file where a folder is needed")
    with pytest.raises(SetupError, match=r"engine\.log cannot be written"):
        fake.start("serve")


@pytest.mark.parametrize("behaviour", ["silent", "other-model"])
def test_a_start_without_end_times_out_and_is_stopped(fake: Fake, behaviour: str) -> None:
    with pytest.raises(SetupError, match="did not serve within 1 s"):
        fake.start(behaviour, start_seconds=1)
    assert not running(fake.child())


def test_an_engine_that_asks_for_a_key_is_not_waited_for(fake: Fake) -> None:
    with pytest.raises(SetupError, match="unset VLLM_API_KEY"):
        fake.start("locked")
    assert not running(fake.child())


def test_progress_on_a_terminal_is_one_line(fake: Fake) -> None:
    shown = Terminal()
    with fake.start("slow", shown=shown):
        pass
    assert shown.getvalue().count("\n") == 1
    assert "engine: loading the weights, " in shown.getvalue()


def test_progress_elsewhere_is_a_line_now_and_then() -> None:
    shown = io.StringIO()
    progress = StartProgress(shown, "engine")
    for tenths in range(101):
        progress.update(tenths / 10, "loading")
    assert shown.getvalue() == "engine: loading, 0 s\nengine: loading, 5 s\nengine: loading, 10 s\n"


def test_an_engine_that_dies_takes_its_children_along(fake: Fake) -> None:
    with fake.start("serve") as engine:
        child = fake.child()
        os.kill(engine.pid, signal.SIGKILL)
        assert eventually(lambda: not engine.alive())
        assert engine.exit_text().startswith("killed by SIGKILL")
        assert eventually(lambda: not running(child))
        assert eventually(lambda: not fake.events_folder.exists())


def test_an_engine_does_not_outlive_a_killed_kvgate(fake: Fake, tmp_path: Path) -> None:
    script = """
        import sys, time
        from pathlib import Path
        from tests.server.engines.test_launch import Fake
        fake = Fake(Path(sys.argv[1]))
        engine = fake.start("serve")
        print(engine.pid, fake.child(), flush=True)
        time.sleep(600)
    """
    folder = tmp_path / "other"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as kvgate:
        assert kvgate.stdout is not None
        pids = [int(word) for word in kvgate.stdout.readline().split()]
        assert len(pids) == 2
        assert all(running(pid) for pid in pids)
        kvgate.kill()
    assert eventually(lambda: not any(running(pid) for pid in pids))
    assert eventually(lambda: not (folder / "sockets").exists())
