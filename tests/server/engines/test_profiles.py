"""pytest tests/server/engines/test_profiles.py: the exact command of each profile, and what is refused."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from kvgate.errors import UsageError
from server.engines.profiles import EngineSpec, EventEndpoints, core_list, engine_command
from server.engines.quantities import parse_bytes, parse_tokens
from server.ledger.sources import Endpoint, EventSources
from server.replica import EngineUrl

EVENTS = EventEndpoints.in_folder("/run/user/7/kvgate-x")
CPU = EngineSpec(
    profile="cpu",
    model="/models/smol",
    served_name="smollm2",
    port=8001,
    max_model_len=8192,
    events=EVENTS,
    offline=True,
    cores=(0, 1),
)
GPU = EngineSpec(profile="gpu", model="org/name", served_name="name", port=8001, events=EventEndpoints.on_ports(5557))


def test_cpu_command() -> None:
    command = engine_command(CPU, "/venv/bin/python")
    assert command.argv == (
        "/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/smol",
        "--host", "127.0.0.1", "--port", "8001", "--served-model-name", "smollm2",
        "--max-model-len", "8192", "--kv-cache-memory-bytes", "1073741824", "--block-size", "32",
        "--enable-prefix-caching", "--enable-prompt-tokens-details", "--kv-events-config", EVENTS.config(),
        "--dtype", "bfloat16", "--enforce-eager",
    )  # fmt: skip
    assert command.env == {
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def test_gpu_command_states_only_what_the_kit_relies_on() -> None:
    command = engine_command(replace(GPU, extra=("--tensor-parallel-size", "2")), "vllm")
    assert command.argv == (
        "vllm", "serve", "org/name", "--host", "127.0.0.1", "--port", "8001", "--served-model-name", "name",
        "--enable-prefix-caching", "--enable-prompt-tokens-details", "--kv-events-config", GPU.events and GPU.events.config(),
        "--tensor-parallel-size", "2",
    )  # fmt: skip
    assert not [name for name in command.env if "CPU" in name or "OFFLINE" in name]


def test_gpu_takes_the_given_quantities() -> None:
    spec = replace(GPU, max_model_len=4096, kv_bytes=2**34, block_size=16, kv_dtype="fp8", events=None)
    words = engine_command(spec, "vllm").argv
    for flag, value in {
        "--max-model-len": "4096",
        "--kv-cache-memory-bytes": str(2**34),
        "--block-size": "16",
        "--kv-cache-dtype": "fp8",
    }.items():
        assert words[words.index(flag) + 1] == value
    assert "--kv-events-config" not in words


def test_without_prefix_caching_there_are_no_events() -> None:
    words = engine_command(replace(CPU, prefix_caching=False), "python").argv
    assert "--no-enable-prefix-caching" in words
    assert "--enable-prefix-caching" not in words
    assert "--kv-events-config" not in words


def test_events_are_bound_not_connected() -> None:
    config = json.loads(EventEndpoints.on_ports(5557).config())
    assert config["endpoint"] == "tcp://*:5557"
    assert config["replay_endpoint"] == "tcp://*:5558"
    assert json.loads(EVENTS.config())["endpoint"] == "ipc:///run/user/7/kvgate-x/kv.sock"


def test_the_default_kv_memory_holds_eight_long_requests_with_room() -> None:
    words = engine_command(CPU, "python").argv
    kv_bytes = int(words[words.index("--kv-cache-memory-bytes") + 1])
    bytes_per_token = 2 * 30 * 3 * 64 * 2  # K and V, layers, KV heads, head size, bf16
    assert kv_bytes // bytes_per_token > 1.5 * 8 * 3_100


def test_shell_rendering_is_the_same_command() -> None:
    spec = replace(CPU, model="/with space/and'quote", extra=("--override", '{"a": 1}'))
    command = engine_command(spec, "python")
    words = shlex.split(command.shell().replace("\\\n", " "))
    assignments = len(command.env)
    assert dict(word.split("=", 1) for word in words[:assignments]) == command.env
    assert tuple(words[assignments:]) == command.argv


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"block_size": 16}, "--block-size 16: the CPU kernel takes multiples of 32 only, try --block-size 32"),
        ({"block_size": 100}, "--block-size 100: .* try --block-size 128"),
        ({"block_size": -32}, "--block-size -32: give a positive"),
        ({"kv_dtype": "int4"}, "--kv-dtype int4: profile cpu takes one of auto, fp8"),
        ({"max_model_len": 0}, "--max-model-len 0: give a positive"),
        ({"port": 0}, "port 0 is not between"),
        ({"extra": ("--port=9",)}, "--port=9 after -- is a flag that kvgate sets itself"),
        ({"extra": ("--kv_events_config", "{}")}, "say --kv-events-port before the --"),
    ],
)
def test_what_cannot_work_is_refused(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        replace(CPU, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "amount"),
    [("1GiB", 2**30), ("512 MiB", 2**29), ("1.5gib", 3 * 2**29), ("2GB", 2 * 10**9), ("1073741824", 2**30)],
)
def test_amounts(text: str, amount: int) -> None:
    assert parse_bytes(text, "--kv-memory") == amount


@pytest.mark.parametrize("text", ["", "GiB", "1 parsec", "-1GiB", "1e9", "1023KiB", "0", "nan"])
def test_amounts_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--kv-memory"):
        parse_bytes(text, "--kv-memory")


@pytest.mark.parametrize("text", ["", "0", "-5", "1k", "٣", "1.0"])
def test_tokens_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--max-model-len"):
        parse_tokens(text, "--max-model-len")


@pytest.mark.parametrize(("cores", "text"), [((0,), "0"), ((0, 1, 2, 5, 7, 8), "0-2,5,7-8"), ((3, 1), "1,3")])
def test_core_list(cores: tuple[int, ...], text: str) -> None:
    assert core_list(cores) == text


def test_the_gateway_is_told_where_to_connect() -> None:
    assert EVENTS.setting() == "ipc:///run/user/7/kvgate-x/kv.sock+ipc:///run/user/7/kvgate-x/replay.sock"
    stated = f"127.0.0.1:8001={EventEndpoints.on_ports(5557).setting()}"
    assert EventSources.parse(stated).of(EngineUrl.parse("http://127.0.0.1:8001")) == {
        0: Endpoint("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
    }
