"""The exact command line and environment of an engine, by profile. Pure: nothing is read from or done to the machine.

cpu: the embedded CPU build of vLLM. gpu: the official vLLM, as `vllm serve`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvgate.errors import UsageError
from server.engines.quantities import GIB

Profile = Literal["cpu", "gpu"]
PROFILES: tuple[Profile, ...] = ("cpu", "gpu")

CPU_BLOCK_MULTIPLE = 32  # the CPU attention kernel takes no other
CPU_BLOCK_SIZE = 32  # tokens; vLLM's own default of 128 would let no prompt under 129 tokens hit
CPU_KV_BYTES = GIB  # 46,592 tokens of SmolLM2 in bf16, room for eight requests of 3,100 tokens with as much again
KV_DTYPES: Mapping[Profile, tuple[str, ...]] = {
    "cpu": ("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
    "gpu": ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"),
}

# what kvgate states itself: given twice, the last would win and the gateway would talk to something it does not know
OWNED_FLAGS = {
    "--block-size": "--block-size",
    "--enable-prefix-caching": "nothing, it is on",
    "--enable-prompt-tokens-details": "nothing, it is on",
    "--host": "--host",
    "--kv-cache-dtype": "--kv-dtype",
    "--kv-cache-memory-bytes": "--kv-memory",
    "--kv-events-config": "--kv-events-port",
    "--max-model-len": "--max-model-len",
    "--model": "--model",
    "--no-enable-prefix-caching": "--no-prefix-caching",
    "--port": "--port or --engine-port",
    "--served-model-name": "--served-model-name",
}


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """Where an engine publishes its KV events and replays missed ones. They carry prompt tokens and ask for no key."""

    publish: str
    replay: str

    @classmethod
    def in_folder(cls, folder: str) -> EventEndpoints:
        return cls(f"ipc://{folder}/kv.sock", f"ipc://{folder}/replay.sock")

    @classmethod
    def on_ports(cls, first: int) -> EventEndpoints:
        # with a * vLLM binds; with an address it would connect instead
        return cls(f"tcp://*:{first}", f"tcp://*:{first + 1}")

    def config(self) -> str:
        """The value of --kv-events-config."""
        settings = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.publish}
        return json.dumps(settings | {"replay_endpoint": self.replay}, separators=(",", ":"))

    def setting(self) -> str:
        """What the gateway's --kv-events says of them, after the engine's host:port and an equals sign."""
        return f"{self.publish}+{self.replay}".replace("*", "{host}")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is to be. Raises UsageError where a value cannot work.

    model: a folder or a hub id. kv_bytes: KV memory in bytes; None leaves it to the profile. max_model_len: tokens; None is
    the most that the model and the KV memory allow. block_size: tokens; None leaves it to the profile. cores: the
    CPUs of a cpu engine, none = vLLM's choice. extra: further vLLM arguments, word by word.
    """

    profile: Profile
    model: str
    served_name: str
    port: int
    host: str = "127.0.0.1"
    max_model_len: int | None = None
    kv_bytes: int | None = None
    block_size: int | None = None
    kv_dtype: str = "auto"
    prefix_caching: bool = True
    events: EventEndpoints | None = None
    offline: bool = False
    cores: tuple[int, ...] = ()
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise UsageError(f"port {self.port} is not between 1 and 65535")
        if self.block_size is not None and self.block_size < 1:
            raise UsageError(f"--block-size {self.block_size}: give a positive number of tokens")
        if self.profile == "cpu" and self.block_size is not None and self.block_size % CPU_BLOCK_MULTIPLE:
            raise UsageError(
                f"--block-size {self.block_size}: the CPU kernel takes multiples of {CPU_BLOCK_MULTIPLE} only, "
                f"try --block-size {-(-self.block_size // CPU_BLOCK_MULTIPLE) * CPU_BLOCK_MULTIPLE}"
            )
        if self.kv_dtype not in KV_DTYPES[self.profile]:
            allowed = ", ".join(KV_DTYPES[self.profile])
            raise UsageError(f"--kv-dtype {self.kv_dtype}: profile {self.profile} takes one of {allowed}")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise UsageError(f"--max-model-len {self.max_model_len}: give a positive number of tokens")
        for word in self.extra:
            instead = OWNED_FLAGS.get(word.partition("=")[0].replace("_", "-"))
            if instead is not None:
                raise UsageError(f"{word} after -- is a flag that kvgate sets itself: say {instead} before the --")


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """argv and the environment variables on top of the caller's own. Never a secret: HF_TOKEN comes from the caller's."""

    argv: tuple[str, ...]
    env: Mapping[str, str]

    def shell(self) -> str:
        """The same as a POSIX shell command, one flag a line."""
        words = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.env.items())]
        line = " ".join(words)
        lines = [line] if line else []
        current = ""
        for word in self.argv:
            if word.startswith("--") and current:
                lines.append(current)
                current = "  " + shlex.quote(word)
            else:
                current = f"{current} {shlex.quote(word)}" if current else shlex.quote(word)
        lines.append(current)
        return " \\\n".join(lines)


def engine_command(spec: EngineSpec, program: str) -> EngineCommand:
    """program: the Python that has the CPU build, or the official `vllm`."""
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    if spec.offline:
        env["HF_HUB_OFFLINE"] = "1"
    if spec.profile == "gpu":
        argv = [program, "serve", spec.model, *_common(spec)]
        return EngineCommand((*argv, *spec.extra), env)
    # vLLM keeps a core for its scheduler: on two cores that doubles the time to first token. All cores then, and none kept
    env["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    if spec.cores:
        env["VLLM_CPU_OMP_THREADS_BIND"] = core_list(spec.cores)
    # the console script `vllm` looks for a distribution of that name, which the CPU build does not have
    argv = [program, "-m", "vllm.entrypoints.openai.api_server", "--model", spec.model, *_common(spec)]
    argv += ["--dtype", "bfloat16", "--enforce-eager"]  # compiling needs a C++ compiler and takes minutes
    return EngineCommand((*argv, *spec.extra), env)


def _common(spec: EngineSpec) -> list[str]:
    argv = ["--host", spec.host, "--port", str(spec.port), "--served-model-name", spec.served_name]
    cpu = spec.profile == "cpu"
    kv_bytes = spec.kv_bytes or (CPU_KV_BYTES if cpu else None)
    block_size = spec.block_size or (CPU_BLOCK_SIZE if cpu else None)
    if spec.max_model_len is not None:
        argv += ["--max-model-len", str(spec.max_model_len)]
    elif cpu:
        argv += ["--max-model-len", "auto"]  # else a long-context model would not start with a laptop's KV memory
    if kv_bytes is not None:
        argv += ["--kv-cache-memory-bytes", str(kv_bytes)]
    if block_size is not None:
        argv += ["--block-size", str(block_size)]
    if spec.kv_dtype != "auto":
        argv += ["--kv-cache-dtype", spec.kv_dtype]
    argv.append("--enable-prefix-caching" if spec.prefix_caching else "--no-enable-prefix-caching")
    argv.append("--enable-prompt-tokens-details")  # off by default, and without it cached tokens are not reported
    if spec.events is not None and spec.prefix_caching:
        argv += ["--kv-events-config", spec.events.config()]
    return argv


def core_list(cores: tuple[int, ...]) -> str:
    """(0, 1, 2, 5) is "0-2,5", as VLLM_CPU_OMP_THREADS_BIND reads it."""
    runs: list[tuple[int, int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], core)
        else:
            runs.append((core, core))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
