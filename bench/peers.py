"""The peers: other routers for LLM engines, each from an environment of its own that scripts/setup-peers makes.

They run with their defaults but for the policy, ports, loopback addresses and logging, which is down to warnings. None of them
checks the key that requests carry, but for LiteLLM, which does not start without one.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import ClassVar

from bench import payloads
from bench.process import LOOPBACK, ROOT, fetch, free_port
from bench.targets import Launch, Target, engine_urls
from kvgate.errors import SetupError

ENVIRONMENTS = ROOT / ".venv-bench"
# nothing is looked up outside: no model hub, no price list, no usage statistics
OFFLINE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}


class Peer(Target):
    """`policy` in the peer's own words."""

    peer: ClassVar[str]  # its environment, lock and name
    package: ClassVar[str]
    start_seconds = 120.0
    optional = True

    def __init__(self, folder: Path, core: int, policy: str | None = None) -> None:
        super().__init__(folder, core)
        self.policy = policy
        self.name = f"{self.peer}/{policy}" if policy else self.peer

    @abstractmethod
    def arguments(self, upstreams: Sequence[int]) -> list[str]:
        """What follows the environment's `python`."""

    def command(self, upstreams: Sequence[int]) -> list[str]:
        python = ENVIRONMENTS / self.peer / "bin" / "python"
        if not (python.parent.parent / "kvgate-packages.stamp").exists():
            raise SetupError(f"{self.peer} is not installed. {_why_not(self.peer)}")
        return [str(python), *self.arguments(upstreams)]

    def environment(self) -> dict[str, str]:
        return dict(os.environ) | OFFLINE

    def start(self, upstreams: Sequence[int]) -> None:
        super().start(upstreams)
        self._await_answers()

    def _await_answers(self, wanted: int = 6, seconds: float = 60.0) -> None:
        """Healthy does not mean that its engines are registered: wait for answers in a row, on either upstream."""
        deadline = time.monotonic() + seconds
        answered, state = 0, ""
        body = payloads.filled(payloads.request_template(290), 0)
        while answered < wanted:
            if time.monotonic() > deadline:
                raise SetupError(f"{self.name} is healthy and does not answer a request ({state}) after {seconds:g} s.")
            try:
                status, answer = fetch(self.port, "POST", payloads.CHAT, body, key=payloads.KEY)
            except (OSError, http.client.HTTPException) as error:
                status, state = 0, type(error).__name__
            else:
                state = f"{status} {answer[:200].decode(errors='replace')}"
            answered = answered + 1 if status == 200 else 0
            if status != 200:
                time.sleep(0.5)


def _why_not(peer: str) -> str:
    """The last word of setting it up. What stands above it in the log may name hosts, and the reason goes into the result."""
    log = ENVIRONMENTS / f"{peer}.log"
    said = [line for line in log.read_text(errors="replace").splitlines() if line] if log.exists() else []
    return f"{said[-1]}: see {log.relative_to(ENVIRONMENTS.parent)}." if said else f"Run scripts/setup-peers {peer}."


class RustRouter(Peer):
    """The three that share an ancestor, and with it their options."""

    module: ClassVar[str]
    log_level: ClassVar[str] = "warn"

    def arguments(self, upstreams: Sequence[int]) -> list[str]:
        call = f"import sys; from {self.module} import main; sys.exit(main())"
        given = {"--host": LOOPBACK, "--port": self.port, "--policy": self.policy, "--log-level": self.log_level}
        given |= {"--prometheus-host": LOOPBACK, "--prometheus-port": free_port()}
        options = [str(word) for option in given.items() for word in option]
        return ["-c", call, *self.subcommand(), *options, "--worker-urls", *engine_urls(upstreams)]

    def subcommand(self) -> list[str]:
        return ["launch"]


class VllmRouter(RustRouter):
    peer = package = "vllm-router"
    module = "vllm_router.launch_router"
    log_level = "warning"

    def __init__(self, folder: Path, core: int, policy: str) -> None:
        super().__init__(folder, core, policy)
        self.once = (
            policy != "cache_aware"
        )  # which asks each engine to render the prompt before it forwards the request

    def subcommand(self) -> list[str]:
        return []


class SglangRouter(RustRouter):
    peer = package = "sglang-router"
    module = "sglang_router.cli"


class Smg(RustRouter):
    peer = package = "smg"
    module = "smg.cli"


class ProductionStack(Peer):
    """The router of vLLM's production-stack, from its sources."""

    peer = "production-stack"
    package = ""  # published as sources only
    sources: ClassVar[Path] = ENVIRONMENTS / peer / "sources"
    attempts = 1

    def arguments(self, upstreams: Sequence[int]) -> list[str]:
        models = ",".join(payloads.MODEL for _ in upstreams)
        return [
            *("-m", "vllm_router.app", "--host", LOOPBACK, "--port", str(self.port), "--log-level", "warning"),
            *("--service-discovery", "static", "--static-backends", ",".join(engine_urls(upstreams))),
            *("--static-models", models, "--routing-logic", str(self.policy)),
        ]

    def environment(self) -> dict[str, str]:
        return super().environment() | {"PYTHONPATH": str(self.sources / "src"), "PYTHONDONTWRITEBYTECODE": "1"}


class LiteLlm(Peer):
    """LiteLLM's proxy with its default strategy, which is random. It rewrites what it passes on."""

    peer = package = "litellm"
    health = "/health/liveliness"
    attempts = 1
    exact = False

    def arguments(self, upstreams: Sequence[int]) -> list[str]:
        entries = [
            {
                "model_name": payloads.MODEL,
                "litellm_params": {
                    "model": f"hosted_vllm/{payloads.MODEL}",
                    "api_base": f"{url}/v1",
                    "api_key": "none",
                },
            }
            for url in engine_urls(upstreams)
        ]
        config = self.folder / "config.yaml"
        settings = {"general_settings": {"master_key": payloads.KEY}, "litellm_settings": {"telemetry": False}}
        config.write_text(json.dumps({"model_list": entries} | settings))  # JSON is YAML
        call = "import sys; from litellm import run_server; sys.exit(run_server())"
        return [
            "-c",
            call,
            "--host",
            LOOPBACK,
            "--port",
            str(self.port),
            "--config",
            str(config),
            "--telemetry",
            "False",
        ]

    def environment(self) -> dict[str, str]:
        return super().environment() | {"LITELLM_LOG": "ERROR"}


POLICIES: tuple[tuple[type[Peer], tuple[str | None, ...]], ...] = (
    (VllmRouter, ("round_robin", "cache_aware")),
    (SglangRouter, ("round_robin", "cache_aware")),
    (Smg, ("round_robin", "cache_aware")),
    (ProductionStack, ("roundrobin", "prefixaware")),
    (LiteLlm, (None,)),
)


def launches() -> dict[str, Launch]:
    """Each peer with each of its policies, by name."""
    return {
        f"{kind.peer}/{policy}" if policy else kind.peer: partial(kind, policy=policy)
        for kind, policies in POLICIES
        for policy in policies
    }


def versions() -> dict[str, str]:
    """What is installed in the peers' environments."""
    found = {}
    for kind, _ in POLICIES:
        folders = [str(path) for path in (ENVIRONMENTS / kind.peer).glob("lib/python*/site-packages")]
        for distribution in metadata.distributions(name=kind.package, path=folders) if kind.package else ():
            found[kind.peer] = distribution.version
    head = ProductionStack.sources / ".git" / "HEAD"
    if head.exists():
        found[ProductionStack.peer] = head.read_text().strip()[:12]
    return found
