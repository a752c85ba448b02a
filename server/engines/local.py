"""An engine on this machine, from what a person asks for: the model folder, the interpreter, a port, cores and sockets."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvgate.errors import SetupError, UsageError
from llm import smollm2
from llm.cache import user_cache
from server.engines.launch import RunningEngine, free_port, launch
from server.engines.machine import socket_folder, usable_cores
from server.engines.profiles import EngineSpec, EventEndpoints, Profile, engine_command
from server.engines.progress import StartProgress

ROOT = Path(__file__).resolve().parents[2]
STAMP = "kvgate-packages.stamp"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What is asked for. model: a folder, a hub id, or None for the embedded model. port: 0 takes a free one.

    The rest is as in EngineSpec. events_port: KV events over TCP there and on the next port, instead of private sockets.
    """

    profile: Profile = "cpu"
    model: str | None = None
    served_name: str | None = None
    port: int = 0
    host: str = "127.0.0.1"
    max_model_len: int | None = None
    kv_bytes: int | None = None
    block_size: int | None = None
    kv_dtype: str = "auto"
    prefix_caching: bool = True
    events_port: int | None = None
    cores: tuple[int, ...] | None = None
    extra: tuple[str, ...] = ()


DEFAULT_REQUEST = EngineRequest()


def engine_python(environ: Mapping[str, str], root: Path = ROOT) -> str:
    """The interpreter with the CPU build: KVGATE_ENGINE_PYTHON, else .venv-engine. Raises SetupError."""
    given = environ.get("KVGATE_ENGINE_PYTHON")
    if given:
        if shutil.which(given) is None:
            raise SetupError(
                f"KVGATE_ENGINE_PYTHON={given} is not a program: name the Python that has vLLM, or unset it"
            )
        return given
    python = root / ".venv-engine" / "bin" / "python"
    if not (python.exists() and (root / ".venv-engine" / STAMP).exists()):
        raise SetupError(f"vLLM for the CPU is not set up in {root / '.venv-engine'}: run scripts/setup-engine")
    return str(python)


def vllm_program(profile: Profile, environ: Mapping[str, str]) -> str:
    """What starts vLLM for the profile: the Python of the CPU build, or the official `vllm`. Raises SetupError."""
    if profile == "cpu":
        return engine_python(environ)
    if shutil.which("vllm", path=environ.get("PATH")) is None:
        raise SetupError(
            "profile gpu needs the official vllm on the PATH: activate its environment, or use profile cpu"
        )
    return "vllm"


def engine_spec(request: EngineRequest, environ: Mapping[str, str]) -> EngineSpec:
    """The request with its gaps filled, without KV events.

    Converts the embedded model where it is asked for and not there yet. Raises UsageError or SetupError.
    """
    max_model_len = request.max_model_len
    if request.model is None:
        model, is_folder = str(embedded_model(environ)), True
        served_name = request.served_name or smollm2.NAME
        max_model_len = max_model_len or smollm2.CONTEXT_TOKENS
    else:
        model, is_folder = named_model(request.model)
        served_name = request.served_name or (os.path.basename(model) if is_folder else model)
    cores = usable_cores() if request.cores is None else request.cores
    return EngineSpec(
        profile=request.profile,
        model=model,
        served_name=served_name,
        port=request.port or free_port(),
        host=request.host,
        max_model_len=max_model_len,
        kv_bytes=request.kv_bytes,
        block_size=request.block_size,
        kv_dtype=request.kv_dtype,
        prefix_caching=request.prefix_caching,
        offline=is_folder,
        cores=cores if request.profile == "cpu" else (),
        extra=request.extra,
    )


def embedded_model(environ: Mapping[str, str]) -> Path:
    """The folder of the embedded model, converted first where it is not there."""
    cache = user_cache(environ)
    folder = cache / "models" / smollm2.FOLDER
    if smollm2.is_complete(folder):
        return folder  # without asking for the CPU build, which a gpu machine need not have
    sys.stderr.write("converting SmolLM2-135M for vLLM, once, about 20 s\n")
    return smollm2.model_folder(cache, smollm2.converter(Path(engine_python(environ))))


def named_model(model: str) -> tuple[str, bool]:
    """An absolute folder and True, or a hub id and False."""
    if os.path.isdir(model):
        if not os.path.isfile(os.path.join(model, "config.json")):
            raise UsageError(f"--model {model} has no config.json: name the folder that holds the model's files")
        return os.path.abspath(model), True
    if not HUB_ID.fullmatch(model):
        raise UsageError(f"--model {model} is not a folder here: give an existing folder, or a hub id such as org/name")
    return model, False


def start_engine(
    request: EngineRequest = DEFAULT_REQUEST,
    *,
    log_path: Path | None = None,
    progress: StartProgress | None = None,
    start_seconds: float = 600.0,
    environ: Mapping[str, str] | None = None,
) -> RunningEngine:
    """An engine that serves, or SetupError. KV events come over sockets in a fresh private folder, unless TCP is asked for.

    log_path: default, the user's cache under engine-PORT.log. progress: default, on stderr.
    """
    environ = os.environ if environ is None else environ
    program = vllm_program(request.profile, environ)
    spec = engine_spec(request, environ)
    folder = None
    if request.events_port is not None:
        spec = replace(spec, events=EventEndpoints.on_ports(request.events_port))
    elif request.prefix_caching:
        folder = socket_folder(environ)
        spec = replace(spec, events=EventEndpoints.in_folder(str(folder)))
    return launch(
        engine_command(spec, program),
        spec,
        log_path or user_cache(environ) / "logs" / f"engine-{spec.port}.log",
        progress or StartProgress(sys.stderr, "engine"),
        start_seconds=start_seconds,
        events_folder=folder,
    )
