"""One real vLLM on the CPU with the embedded model, for the whole session. Everything in this folder is marked `engine`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.engines.launch import RunningEngine
from server.engines.local import EngineRequest, start_engine
from server.engines.progress import StartProgress

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """Serves smollm2 with 1 GiB of KV in blocks of 32 and KV events. Its cache is shared: use prompts of your own."""
    log_path = tmp_path_factory.mktemp("engine") / "engine.log"
    progress = StartProgress(sys.__stderr__ or sys.stderr, "engine")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with start_engine(EngineRequest(profile="cpu", extra=tools), log_path=log_path, progress=progress) as running:
        yield running
