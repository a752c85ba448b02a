"""Start an engine, wait until it serves, and leave nothing of it behind.

An engine is a process group of its own: vLLM is three processes, and a terminal's Ctrl-C must reach kvgate alone, which drains
before it stops the engine. keeper.py ends the group if kvgate cannot.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from kvgate.errors import SetupError
from server.engines import log
from server.engines.log import log_tail
from server.engines.profiles import EngineCommand, EngineSpec, EventEndpoints
from server.engines.progress import StartProgress

__all__ = ["RunningEngine", "check_port", "free_port", "launch", "log_tail"]

KEEPER = Path(__file__).with_name("keeper.py")
START_SECONDS = 600.0
STOP_SECONDS = 20.0
ABORT_SECONDS = 5.0  # while it starts there is nothing to finish
KILL_SECONDS = 5.0
POLL_SECONDS = 0.25


@dataclass(slots=True)
class RunningEngine:
    """An engine that serves. Leaving the context stops it.

    url: base without /v1. pid: of the API server, which is also the process group. events: None where none are published.
    """

    url: str
    model: str
    pid: int
    log_path: Path
    events: EventEndpoints | None
    seconds_to_start: float
    _process: subprocess.Popen[bytes] = field(repr=False)
    _lifeline: BinaryIO = field(repr=False)
    _events_folder: Path | None = field(repr=False)

    @property
    def metrics_url(self) -> str:
        return f"{self.url}/metrics"

    def alive(self) -> bool:
        return self._process.poll() is None

    def exit_text(self) -> str:
        """How it ended, with the last lines of its log."""
        return "\n".join([_ended(self._process.returncode), *log.evidence(self.log_path)])

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """SIGTERM to the group, SIGKILL after `seconds`. Harmless when it is gone."""
        _end(self._process, self._lifeline, seconds)
        if self._events_folder is not None:
            shutil.rmtree(self._events_folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def launch(
    command: EngineCommand,
    spec: EngineSpec,
    log_path: Path,
    progress: StartProgress,
    *,
    start_seconds: float = START_SECONDS,
    events_folder: Path | None = None,
) -> RunningEngine:
    """Start `command` and wait until `spec` is served. Raises SetupError: one sentence, then the end of the log.

    `events_folder` is removed when the engine ends, or does not start.
    """
    try:
        check_port(spec.host, spec.port)
        process, lifeline = _spawn(command, log_path, events_folder)
    except BaseException:
        _remove(events_folder)
        raise
    try:
        seconds = _wait(process, spec, log_path, progress, start_seconds)
    except BaseException:
        # also on Ctrl-C: an engine that nobody waits for must not stay
        progress.clear()
        _end(process, lifeline, ABORT_SECONDS)
        _remove(events_folder)
        raise
    return RunningEngine(
        url=_url(spec),
        model=spec.served_name,
        pid=process.pid,
        log_path=log_path,
        events=spec.events if spec.prefix_caching else None,
        seconds_to_start=seconds,
        _process=process,
        _lifeline=lifeline,
        _events_folder=events_folder,
    )


def check_port(host: str, port: int) -> None:
    """Raises SetupError where the port is taken: something else would answer in the engine's place."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or error
            raise SetupError(
                f"port {port} on {host} cannot be used ({reason}): stop what uses it, or choose another"
            ) from None


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _url(spec: EngineSpec) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(spec.host, spec.host)  # noqa: S104 - read, not bound
    return f"http://{host}:{spec.port}"


def _spawn(
    command: EngineCommand, log_path: Path, events_folder: Path | None
) -> tuple[subprocess.Popen[bytes], BinaryIO]:
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        # the owner's only: with request logging turned on it would hold prompts
        output = os.fdopen(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
    except OSError as error:
        raise SetupError(f"the engine's log {log_path} cannot be written ({error.strerror}): choose another") from None
    watched, kept = os.pipe()
    lifeline = os.fdopen(kept, "wb", buffering=0)
    try:
        with output:
            process = subprocess.Popen(
                [sys.executable, "-I", str(KEEPER), str(watched), str(events_folder or ""), *command.argv],
                env=os.environ | dict(command.env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(watched,),
            )
    except BaseException:
        lifeline.close()
        raise
    finally:
        os.close(watched)
    return process, lifeline


def _wait(
    process: subprocess.Popen[bytes], spec: EngineSpec, log_path: Path, progress: StartProgress, start_seconds: float
) -> float:
    """Seconds until it served."""
    started = time.monotonic()
    while True:
        seconds = time.monotonic() - started
        if process.poll() is not None:
            raise _failure(f"the engine ended before it served, {_ended(process.returncode)}", log_path)
        if _serves(spec):
            progress.end(f"serving {spec.served_name} on {_url(spec)} after {seconds:.1f} s")
            return seconds
        if seconds > start_seconds:
            raise _failure(f"the engine did not serve within {start_seconds:g} s", log_path)
        progress.update(seconds, log.phase_of(log.read(log_path)))
        time.sleep(POLL_SECONDS)


def _failure(sentence: str, log_path: Path) -> SetupError:
    return SetupError("\n".join([f"{sentence}: see the end of {log_path}", *log.evidence(log_path)]))


def _serves(spec: EngineSpec) -> bool:
    """Healthy, and it is this model that answers."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy for the web knows no local engine
    try:
        with direct.open(f"{_url(spec)}/health", timeout=2.0):
            pass
        with direct.open(f"{_url(spec)}/v1/models", timeout=5.0) as answer:
            models = json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 401:
            raise SetupError("the engine asks for a key: unset VLLM_API_KEY, keys are the gateway's task") from None
        return False
    except (OSError, ValueError, KeyError):
        return False
    return any(model["id"] == spec.served_name for model in models)


def _end(process: subprocess.Popen[bytes], lifeline: BinaryIO, seconds: float) -> None:
    if lifeline.closed:
        return
    # one that ended by itself is left to its keeper: by now the number might be another group's
    if process.poll() is None:
        _signal_group(process.pid, signal.SIGTERM)
    if not _gone(process, seconds):
        _signal_group(process.pid, signal.SIGKILL)
        _gone(process, KILL_SECONDS)
    process.wait()
    lifeline.close()


def _gone(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether every process of the group ended within `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        if process.poll() is not None:
            _reap_adopted(process.pid)
        if not _signal_group(process.pid, 0):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)


def _reap_adopted(group: int) -> None:
    """As process 1 of a container kvgate inherits the engine's own children, which stay in the group until they are reaped."""
    try:
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _signal_group(group: int, number: int) -> bool:
    """Sends the signal (0 sends none). False where no process of the group is left."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
        return False
    return True


def _ended(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _remove(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
