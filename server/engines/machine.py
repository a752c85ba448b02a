"""What this machine gives an engine: its cores, and a private folder for sockets."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

# a Unix socket's path ends at 104 bytes on macOS and 108 on Linux
SOCKET_PATH_BYTES = 100


def usable_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> tuple[int, ...]:
    """The cores this process may run on, no more than its container is granted; empty where the system does not tell.

    More threads than granted cores would be stopped by the kernel in the middle of each step.
    """
    if not hasattr(os, "sched_getaffinity"):
        return ()
    cores = sorted(os.sched_getaffinity(0))
    try:
        quota, period = quota_file.read_text().split()
        granted = math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no cgroup, or "max"
        granted = len(cores)
    return tuple(cores[: max(1, granted)])


def share_of_cores(cores: tuple[int, ...], part: int, parts: int) -> tuple[int, ...]:
    """The `part`-th of `parts` shares, as equal as they can be; all cores where there are too few to share."""
    if len(cores) < parts:
        return cores
    return cores[len(cores) * part // parts : len(cores) * (part + 1) // parts]


def socket_folder(environ: Mapping[str, str]) -> Path:
    """A fresh folder that only this user can enter, with a path short enough for sockets in it."""
    longest = len("/kvgate-xxxxxxxx/replay.sock")
    for base in (environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"):  # noqa: S108 - mkdtemp is safe there
        if base and len(os.fsencode(base)) + longest <= SOCKET_PATH_BYTES and os.access(base, os.W_OK | os.X_OK):
            break
    return Path(tempfile.mkdtemp(prefix="kvgate-", dir=base))
