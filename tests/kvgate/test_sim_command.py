"""pytest tests/kvgate/test_sim_command.py: the command line of `kvgate sim`, and the fleet as a process."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from kvgate.cli import build_parser, main
from kvgate.commands.sim import read_settings
from loadtest.sim.faults import Faults
from loadtest.sim.replica import SimSettings


def parsed(*words: str) -> argparse.Namespace:
    return build_parser(["sim"]).parse_args(["sim", *words])


def settings(*words: str) -> SimSettings:
    return read_settings(parsed(*words))


def test_what_is_given_is_what_is_simulated() -> None:
    words = "--port 9001 --replicas 8 --block-size 16 --kv-tokens 100000 --prefill-tokens-per-s 8000 --decode-ms 10"
    made = settings(*words.split(), "--model", "org/name", "--lora", "style=/a", "--fault", "error_share=0.25")
    assert (made.shape.blocks, made.shape.block_size, made.shape.max_model_len) == (6250, 16, 6249 * 16)
    assert (made.shape.profile.token_s, made.shape.profile.weights_s) == (1 / 8000, 0.010)
    assert (made.model.name, made.model.root, list(made.model.loras)) == ("org/name", "org/name", ["style"])
    assert made.faults == Faults(error_share=0.25)
    assert made.events is None


def test_a_profile_gives_size_and_speed_and_flags_come_before_it() -> None:
    made = settings("--profile", "h100:llama-3.1-8b")
    assert made.shape.blocks > 20_000
    assert made.shape.profile.kind == "estimate"
    made = settings("--profile", "cpu:smollm2", "--decode-ms", "5", "--kv-tokens", "3200")
    assert (made.shape.block_size, made.shape.blocks) == (32, 100)
    assert (made.shape.profile.kind, made.shape.profile.weights_s) == ("given", 0.005)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replicas", "0"], "--replicas 0"),
        (["--port", "65535", "--replicas", "2"], "--port 65535"),
        (["--profile", "h100:gpt"], "--profile h100:gpt: there is none"),
        (["--decode-ms", "0"], "--decode-ms 0"),
        (["--kv-tokens", "16"], "--kv-tokens 16"),
        (["--kv-tokens", "1600", "--max-model-len", "1600"], "give --kv-tokens 1616"),
        (["--block-size", "x"], "--block-size x"),
        (["--model", "./missing"], "--model ./missing: there is no such folder"),
        (["--lora", "style"], "--lora style"),
        (["--fault", "error_share=2"], "--fault error_share: give a share"),
        (["--fault", "error_share"], "--fault error_share: give a number"),
        (["--fault", "restart_down_s=1"], "POST /sim/faults"),
        (["--kv-events-port", "65535"], "--kv-events-port 65535"),
    ],
)
def test_a_wrong_flag_is_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", *words]) == 2
    assert said in capsys.readouterr().err


def test_sockets_lie_in_a_folder_that_nobody_else_can_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "events"
    made = settings("--kv-events-dir", str(folder))
    assert made.events
    assert made.events.of("127.0.0.1", 0, 9001).publish == f"ipc://{folder}/kv-9001.sock"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    assert main(["sim", "--kv-events-dir", str(folder)]) == 2
    assert f"chmod 700 {folder}" in capsys.readouterr().err


def test_a_fleet_serves_until_it_is_told_to_end() -> None:
    argv = [sys.executable, "-m", "kvgate", "sim", "--port", "0", "--replicas", "3", "--decode-ms", "1"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr
            assert "3 × sim, 6250 KV blocks of 16 tokens, time from profile given" in process.stderr.readline()
            urls = [line.split()[1] for line in (process.stderr.readline() for _ in range(3))]
            assert len(set(urls)) == 3
            for url in urls:
                assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
                body = json.dumps({"prompt": "Once upon a time", "max_tokens": 3}).encode()
                asked = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
                with urllib.request.urlopen(asked, timeout=20) as answer:
                    assert json.load(answer)["usage"]["prompt_tokens"] == 6
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()
