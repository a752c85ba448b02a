"""An engine's log: the phase that its start has reached, and what to show of it when it fails."""

from __future__ import annotations

import re
from pathlib import Path

TAIL_LINES = 15
TAIL_BYTES = 64 * 1024
LINE_LENGTH = 500

# the latest phase whose words occur in the log; in the order in which vLLM goes through them
_PHASES = (
    ("loading vLLM", ""),
    ("reading the model's configuration", "non-default args"),
    ("starting the engine process", "Initializing a V1 LLM engine"),
    ("loading the weights", "Starting to load model"),
    ("allocating the KV cache", "Loading weights took"),
    ("starting the API server", "KV cache size"),
    ("answering the first request", "Application startup complete"),
)

# "(EngineCore pid=7) ERROR 11-29 23:26:13 [core.py:1510] ValueError: ..." with or without what the logger puts before it
_CAUSE = re.compile(
    r"^(?:\([^)]*\) )?(?:ERROR \S+ \S+ \[[^]]*\] )?((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE
)


def read(path: Path) -> str:
    """The end of the log, TAIL_BYTES at most; empty where it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def phase_of(text: str) -> str:
    return next(name for name, words in reversed(_PHASES) if words in text)


def log_tail(path: Path) -> list[str]:
    """The last lines that are not blank, indented, to follow an error's sentence."""
    return _tail(read(path))


def evidence(path: Path) -> list[str]:
    """The errors that the log names, the first of which is the cause, then its last lines.

    vLLM's processes each log the failure of the one below, so that the cause is far from the end.
    """
    text = read(path)
    causes = dict.fromkeys(cause[:LINE_LENGTH] for cause in _CAUSE.findall(text))
    tail = _tail(text)
    shown = [f"  {cause}" for cause in list(causes)[:3]]
    shown = [cause for cause in shown if cause not in tail]
    return [*shown, "  ...", *tail] if shown else tail


def _tail(text: str) -> list[str]:
    return [f"  {line[:LINE_LENGTH]}" for line in text.splitlines() if line.strip()][-TAIL_LINES:]
