"""`kvgate loadtest run` as a user calls it, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from kvgate.cli import main
from loadtest.planfile import read_plan
from tests.loadtest.cache_engine import CacheEngine, Faults

ROOT = Path(__file__).parents[2]
SMALL = "--groups 1 --sessions 2 --prefix-tokens 40 --output-tokens 2 --unloaded-pairs 1 --unloaded-prefix-tokens 40"
LENIENT = "--max-send-lag-ms 5000 --max-loop-lag-ms 5000"


async def call(engine: CacheEngine, out: Path, *more: str) -> tuple[int, bytes, bytes]:
    command = ["loadtest", "run", "--url", engine.url, "--engine-metrics", engine.metrics_url, "--out", str(out)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "kvgate", *command, *SMALL.split(), *LENIENT.split(), *more),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    stdout, stderr = await process.communicate()
    assert process.returncode is not None
    return process.returncode, stdout, stderr


async def test_json_is_alone_on_stdout_and_the_files_are_there(tmp_path: Path) -> None:
    async with CacheEngine() as engine:
        code, stdout, stderr = await call(engine, tmp_path, "--json")
    assert code == 0, stderr
    assert json.loads(stdout)["valid"] is True
    assert stdout == (tmp_path / "result.json").read_bytes()
    assert b"loaded, prefix caching on: 2/2" in stderr
    assert set(os.listdir(tmp_path)) == {"plan.jsonl", "samples.jsonl", "result.json", "report.html"}
    assert len((tmp_path / "samples.jsonl").read_bytes().splitlines()) == 2 + 4 * 2
    assert len(read_plan(tmp_path / "plan.jsonl").requests) == 3


async def test_an_invalid_result_is_exit_1(tmp_path: Path) -> None:
    async with CacheEngine(faults=Faults(drop_salt=True)) as engine:
        code, stdout, _ = await call(engine, tmp_path)
    assert code == 1
    assert stdout.startswith(b"INVALID")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--url nowhere", "--url"),
        ("--url http://h --groups 0", "--groups"),
        ("--url http://h --rate -1", "--rate"),
        ("--url http://h --vocab 5", "--vocab"),
        ("--url http://h --arms off,of", "--arms"),
        ("--url http://h --order AC", "--order"),
        ("--url http://h --max-error-rate 2", "--max-error-rate"),
        ("--url http://h --plan /nowhere/plan.jsonl", "--plan"),
        ("--url http://127.0.0.1:9", "--url http://127.0.0.1:9"),
    ],
)
def test_a_wrong_flag_is_exit_2_and_named(
    flags: str, named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    try:
        code = main(["loadtest", "run", "--out", str(tmp_path), *flags.split()])
    except SystemExit as exit_:
        code = int(str(exit_.code))
    assert code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]
