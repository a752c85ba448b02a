"""What runs on this machine, from /proc, or from ps where there is none."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PROC = Path("/proc/self/stat")


def running(pid: int) -> bool:
    """Zombies do not count: who reaps an orphan depends on the machine."""
    if PROC.exists():
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
    else:
        state = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
        ).stdout.strip()
    return state[:1] not in ("", "Z", "X")


def group_members(group: int) -> list[str]:
    """The command lines of the processes in a process group."""
    if not PROC.exists():
        listing = subprocess.run(["ps", "-A", "-o", "pgid=,args="], capture_output=True, text=True, check=True).stdout
        rows = [line.split(maxsplit=1) for line in listing.splitlines()]
        return [row[1] for row in rows if row[0] == str(group)]
    members = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        if int(fields[2]) == group:
            members.append(command.strip())
    return members


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
