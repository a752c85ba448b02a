"""pytest tests/server/engines/test_local.py: an engine from what a person asks for, on this machine."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from kvgate.errors import SetupError, UsageError
from server.engines import log
from server.engines.local import STAMP, EngineRequest, engine_python, engine_spec, named_model, vllm_program
from server.engines.machine import SOCKET_PATH_BYTES, share_of_cores, socket_folder, usable_cores


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_is_served_offline_under_its_name(model: Path) -> None:
    spec = engine_spec(EngineRequest(model=str(model), cores=(0,)), {})
    assert (spec.model, spec.served_name, spec.offline, spec.max_model_len) == (str(model), "my-model", True, None)
    assert spec.port > 0
    assert spec.cores == (0,)


def test_a_hub_id_is_served_under_its_id() -> None:
    spec = engine_spec(EngineRequest(profile="gpu", model="org/name", port=8001), {})
    assert (spec.model, spec.served_name, spec.offline, spec.cores) == ("org/name", "org/name", False, ())


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere", "a/b/c", "", "org/na me"])
def test_a_model_that_is_neither_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not a folder here"):
        named_model(name)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json"):
        named_model(str(tmp_path))


def test_the_engine_environment_counts_only_when_it_is_finished(tmp_path: Path) -> None:
    python = tmp_path / ".venv-engine/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("")
    with pytest.raises(SetupError, match="run scripts/setup-engine"):
        engine_python({}, tmp_path)
    (tmp_path / ".venv-engine" / STAMP).write_text("x")
    assert engine_python({}, tmp_path) == str(python)


def test_the_stamp_is_the_one_that_the_script_writes() -> None:
    script = Path(__file__).parents[3] / "scripts/setup-engine"
    assert f".venv-engine/{STAMP}\n" in script.read_text()


def test_another_engine_python_may_be_named(tmp_path: Path) -> None:
    assert engine_python({"KVGATE_ENGINE_PYTHON": sys.executable}, tmp_path) == sys.executable
    with pytest.raises(SetupError, match="KVGATE_ENGINE_PYTHON=/nowhere is not a program"):
        engine_python({"KVGATE_ENGINE_PYTHON": "/nowhere"}, tmp_path)


def test_profile_gpu_needs_vllm_on_the_path(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="profile gpu needs the official vllm"):
        vllm_program("gpu", {"PATH": str(tmp_path)})


def test_sockets_get_a_private_folder_with_a_short_path(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    folder = socket_folder({"XDG_RUNTIME_DIR": str(long)})
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(os.fsencode(folder / "replay.sock")) <= SOCKET_PATH_BYTES
    finally:
        folder.rmdir()


def test_cores_are_no_more_than_the_container_is_granted(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    everything = usable_cores(quota)
    quota.write_text("max 100000\n")
    assert usable_cores(quota) == everything
    quota.write_text("50000 100000\n")
    assert len(usable_cores(quota)) == min(1, len(everything))


def test_engines_share_the_cores() -> None:
    assert [share_of_cores((0, 1, 2, 3, 4), part, 2) for part in range(2)] == [(0, 1), (2, 3, 4)]
    assert share_of_cores((0,), 1, 2) == (0,)


def test_the_phase_is_the_latest_that_the_log_names() -> None:
    assert log.phase_of("") == "loading vLLM"
    assert log.phase_of("INFO non-default args: {}\nInitializing a V1 LLM engine") == "starting the engine process"
    assert log.phase_of("CPU KV cache size: 46,592 tokens") == "starting the API server"


def test_evidence_of_a_log_that_is_not_there(tmp_path: Path) -> None:
    assert log.evidence(tmp_path / "none") == []
