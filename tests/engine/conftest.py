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
    """Serves smollm2 with 1 GiB of KV in blocks of 32 and KV events. Its cache is shared: use prompts of your own.

    In development mode, so that its cache can be reset.
    """
    log_path = tmp_path_factory.mktemp("engine") / "engine.log"
    progress = StartProgress(sys.__stderr__ or sys.stderr, "engine")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    templates = ("--trust-request-chat-template",)  # so that one engine can show what others' templates give
    request = EngineRequest(profile="cpu", extra=tools + templates)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        started = start_engine(request, log_path=log_path, progress=progress)
    with started as running:
        yield running
