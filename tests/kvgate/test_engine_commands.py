"""pytest tests/kvgate/test_engine_commands.py: `engine` and `up` as processes, with a fake engine in vLLM's place."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgate.cli import main
from tests.fakes.program import write_program
from tests.server.engines.processes import eventually, running

FAKE = Path(__file__).parents[1] / "server/engines/fake_engine.py"


class Command:
    """A running kvgate command; `stderr` is read as it comes."""

    def __init__(self, environ: dict[str, str], *words: str) -> None:
        argv = [sys.executable, "-m", "kvgate", *words]
        self.process = subprocess.Popen(argv, env=environ, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.stderr = ""

    def wait_for(self, pattern: str) -> re.Match[str]:
        assert self.process.stderr is not None
        while (match := re.search(pattern, self.stderr)) is None:
            line = self.process.stderr.readline()
            assert line, f"ended without {pattern!r}:\n{self.stderr}"
            self.stderr += line
        return match

    def end(self, number: int | None = None) -> int:
        if number is not None:
            self.process.send_signal(number)
        self.stderr += self.process.communicate(timeout=30)[1]
        return self.process.returncode


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The fake engine stands in for the Python that has vLLM."""
    python = tmp_path / "python"
    write_program(
        python,
        f"""
        import os, sys
        port = sys.argv[sys.argv.index("--port") + 1]
        behaviour = os.environ.get("FAKE_BEHAVIOUR", "serve")
        os.execv(sys.executable, [sys.executable, {str(FAKE)!r}, port, behaviour])
        """,
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    return os.environ | {"KVGATE_ENGINE_PYTHON": str(python), "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    log = str(tmp_path / "engine.log")
    return ["--model", str(tmp_path / "model"), "--served-model-name", "smollm2", "--log", log, "--start-timeout", "30"]


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    started: list[Command] = []
    yield started
    for command in started:
        if command.process.poll() is None:
            command.process.kill()
        command.process.communicate()


def engine_pids(tmp_path: Path) -> tuple[int, int]:
    """The fake engine and its child."""
    match = re.search(r"engine (\d+) child (\d+)", (tmp_path / "engine.log").read_text())
    assert match is not None
    return int(match[1]), int(match[2])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_engine_run_stops_its_engine(
    environ: dict[str, str], flags: list[str], commands: list[Command], tmp_path: Path, number: int
) -> None:
    command = Command(environ, "engine", "run", "--port", "0", *flags)
    commands.append(command)
    command.wait_for("Ctrl-C stops it")
    pids = engine_pids(tmp_path)
    assert command.end(number) == 0
    assert not any(running(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_and_stops_whole(
    environ: dict[str, str], flags: list[str], commands: list[Command], tmp_path: Path, number: int
) -> None:
    command = Command(environ, "up", "--port", "0", *flags)
    commands.append(command)
    url = command.wait_for(r"listens on (http://\S+)")[1]
    with urllib.request.urlopen(f"{url}/health/live", timeout=10) as answer:
        assert answer.status == 200
    pids = engine_pids(tmp_path)
    assert command.end(number) == 0
    assert not any(running(pid) for pid in pids)


def test_up_says_so_when_the_engine_dies(
    environ: dict[str, str], flags: list[str], commands: list[Command], tmp_path: Path
) -> None:
    command = Command(environ, "up", "--port", "0", *flags)
    commands.append(command)
    command.wait_for("listens on")
    os.kill(engine_pids(tmp_path)[0], signal.SIGKILL)
    assert command.end() == 2
    assert re.search(r"kvgate up: the engine at http://\S+ ended by itself, killed by SIGKILL", command.stderr)


def test_an_interrupted_start_leaves_no_engine(
    environ: dict[str, str], flags: list[str], commands: list[Command], tmp_path: Path
) -> None:
    command = Command(environ | {"FAKE_BEHAVIOUR": "silent"}, "up", "--port", "0", *flags)
    commands.append(command)
    command.wait_for("engine: loading")
    log = tmp_path / "engine.log"
    assert eventually(lambda: log.exists() and "child" in log.read_text())
    pids = engine_pids(tmp_path)
    assert command.end(signal.SIGTERM) == 130
    assert not any(running(pid) for pid in pids)


def test_a_failed_start_is_one_sentence_and_the_log(
    environ: dict[str, str], flags: list[str], commands: list[Command]
) -> None:
    command = Command(environ | {"FAKE_BEHAVIOUR": "die"}, "engine", "run", "--port", "0", *flags)
    commands.append(command)
    assert command.end() == 2
    assert "kvgate engine: the engine ended before it served, exit status 3: see the end of " in command.stderr
    assert "Traceback (most recent call last)" not in command.stderr


def test_print_json_is_the_command_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["engine", "print", "--profile", "gpu", "--model", "org/name", "--kv-memory", "8GiB", "--json"]
    assert main([*words, "--", "--tensor-parallel-size", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["argv"][:3] == ["vllm", "serve", "org/name"]
    assert document["argv"][-2:] == ["--tensor-parallel-size", "2"]
    assert str(8 * 2**30) in document["argv"]
    assert document["private_folder"].startswith("/tmp/kvgate-")
    assert main([*words, "--", "--tensor-parallel-size", "2"]) == 0
    assert json.loads(capsys.readouterr().out) == document


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon"])
def test_a_start_takes_a_while(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["up", "--start-timeout", seconds])
    assert ended.value.code == 2
    assert f"{seconds} is not a number above 0" in capsys.readouterr().err


def test_print_never_shows_a_token(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert main(["engine", "print", "--profile", "gpu", "--model", "org/name"]) == 0
    shown = capsys.readouterr()
    assert "hf_secret" not in shown.out + shown.err
    assert shown.out.startswith("install -d -m 0700 /tmp/kvgate-")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["engine", "print", "--profile", "gpu"], "--model is missing"),
        (
            ["engine", "print", "--profile", "gpu", "--model", "m", "--port", "70000"],
            "--port 70000: give a port number",
        ),
        (
            ["engine", "print", "--profile", "gpu", "--model", "m", "--kv-memory", "lots"],
            "--kv-memory lots: give an amount",
        ),
        (["engine", "print", "--profile", "gpu", "--model", "m", "stray"], "'stray' is not a flag"),
        (["up", "--profile", "gpu", "--model", "m", "--engines", "2"], "--engines: with profile gpu"),
        (["up", "--engines", "none"], "--engines none: give a number"),
        (["up", "--engine-port", "70000"], "--engine-port 70000: give a port number"),
        (["up", "--policy", "none"], "--policy 'none' is not one of"),
        (["up", "--log-level", "loud"], "--log-level 'loud' is not one of"),
        (["up", "--access-log", "/dev/null/log"], "--access-log /dev/null/log"),
        (["demo", "--out", "/dev/null/out"], "--out /dev/null/out cannot be written"),
    ],
)
def test_mistakes_are_named_before_an_engine_starts(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVGATE_ENGINE_PYTHON", "/dev/null/python")
    assert main(words) == 2
    assert sentence in capsys.readouterr().err
