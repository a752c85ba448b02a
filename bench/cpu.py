"""CPU time from /proc, and which core a process runs on. Linux only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """One line of /proc/PID/stat. `ticks` is user and system time, that of children already reaped included."""

    pid: int
    parent: int
    ticks: int

    @classmethod
    def parse(cls, line: str) -> ProcessStat:
        # the name in parentheses may itself hold spaces and parentheses, so count from the last one
        pid = int(line.partition(" ")[0])
        fields = line.rpartition(")")[2].split()
        return cls(pid, int(fields[1]), sum(int(x) for x in fields[11:15]))


def processes(proc: Path = PROC) -> dict[int, ProcessStat]:
    """Every process that can be read now; one that ends meanwhile is left out."""
    found = {}
    for path in proc.glob("[0-9]*/stat"):
        try:
            stat = ProcessStat.parse(path.read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue
        found[stat.pid] = stat
    return found


def tree(root: int, stats: Mapping[int, ProcessStat]) -> set[int]:
    """`root` and all its descendants."""
    members = {root} & stats.keys()
    grown = True
    while grown:
        more = {pid for pid, stat in stats.items() if stat.parent in members} - members
        members |= more
        grown = bool(more)
    return members


def tree_cpu_seconds(root: int, proc: Path = PROC) -> float:
    """User and system time of the tree so far, in seconds; its resolution is one clock tick (10 ms) per process."""
    stats = processes(proc)
    return sum(stats[pid].ticks for pid in tree(root, stats)) / os.sysconf("SC_CLK_TCK")


def tree_rss_mb(root: int, proc: Path = PROC) -> float:
    """Resident memory of the tree in MB (1e6 bytes); pages shared between its processes count in each."""
    pages = 0
    for pid in tree(root, processes(proc)):
        try:
            pages += int((proc / str(pid) / "statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def core_busy_seconds(core: int, proc: Path = PROC) -> float:
    """Time that a core has spent on anything but idling, in seconds, steal included."""
    for line in (proc / "stat").read_text().splitlines():
        name, *ticks = line.split()
        if name == f"cpu{core}":
            user, nice, system, _idle, _iowait, irq, softirq, steal = (int(x) for x in ticks[:8])
            return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    raise ValueError(f"no core {core}")


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """Processes started inside stay on `core`, with all that they start."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
