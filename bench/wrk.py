"""Closed-loop load by wrk, one thread on the load core."""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bench import payloads
from bench.cpu import pinned
from bench.debian import program
from kvgate.errors import SetupError

SCRIPT = Path(__file__).with_name("post.lua")
ERRORS = ("connect", "read", "write", "status", "timeout")


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of wrk saw. `requests` were answered; `failures` counts errors by kind, those above zero only."""

    requests: int
    seconds: float
    failures: dict[str, int]
    p50_ms: float | None
    p99_ms: float | None

    @classmethod
    def parse(cls, text: str) -> Load:
        """From the JSON line of post.lua. Statuses of 400 and above are among `requests` for wrk; here they are not."""
        said = json.loads(text)
        failures = {kind: said[kind] for kind in ERRORS if said[kind]}
        answered = said["requests"] - said["status"]
        return cls(answered, said["duration_us"] / 1e6, failures, said["p50_us"] / 1e3, said["p99_us"] / 1e3)


def run(url: str, template: Path, concurrency: int, seconds: float, first_serial: int, core: int) -> Load:
    """Blocks for about `seconds` (wrk knows whole seconds only: they are rounded up). A target that cannot be reached
    is a failure like any other, since wrk gives up on it before it measures."""
    whole = max(1, math.ceil(seconds))
    command = [program("wrk"), "-t1", f"-c{concurrency}", f"-d{whole}s", "--timeout", "10s", "-s", str(SCRIPT)]
    command += [url, "--", str(template), payloads.CHAT, payloads.KEY, str(first_serial)]
    with pinned(core):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=whole + 30)
    lines = [line for line in done.stderr.splitlines() if line.startswith("{")]
    if "unable to connect" in done.stdout + done.stderr:
        return Load(0, whole, {"connect": concurrency}, None, None)
    if done.returncode != 0 or not lines:
        raise SetupError(f"wrk failed with exit code {done.returncode}.\n{(done.stdout + done.stderr)[-2000:]}")
    return Load.parse(lines[-1])
