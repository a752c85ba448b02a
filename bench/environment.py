"""Where and with what a result was measured."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from bench import debian
from bench.process import ROOT
from kvgate.errors import SetupError

PACKAGES = ("uvicorn", "httptools", "uvloop", "fastapi", "orjson")


def describe(load_core: int, gateway_core: int, tools: Sequence[str], ignored: Sequence[Path]) -> dict[str, Any]:
    """`ignored` are files that this run itself writes: they do not make the tree dirty."""
    return {
        "commit": commit(),
        "dirty": dirty(ignored),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load_core": load_core,
        "gateway_core": gateway_core,
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "kernel": f"{platform.system()} {platform.release()}",
        "versions": {
            "python": platform.python_version(),
            **{tool: debian.version(tool) for tool in tools},
            **{package: metadata.version(package) for package in PACKAGES},
        },
    }


def two_cores() -> tuple[int, int]:
    """A core for the load and one for the gateway, out of those that this process may use."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        raise SetupError("The benchmark needs two cores: one for the load, one for the gateway.")
    return allowed[0], allowed[1]


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def commit() -> str | None:
    """None outside a git checkout."""
    said = _git("rev-parse", "HEAD")
    return said.strip() if said else None


def dirty(ignored: Sequence[Path]) -> bool | None:
    """Whether any other file differs from the commit; None outside a git checkout."""
    said = _git("status", "--porcelain", "--untracked-files=all")
    if said is None:
        return None
    names = {line[3:] for line in said.splitlines()}
    return bool(names - {os.path.relpath(path.resolve(), ROOT) for path in ignored})


def _git(*arguments: str) -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    done = subprocess.run([git, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=20)
    return done.stdout if done.returncode == 0 else None
