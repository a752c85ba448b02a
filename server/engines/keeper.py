"""A script between kvgate and an engine: it becomes the engine, and leaves a watcher that ends it if kvgate is gone.

    python keeper.py LIFELINE FOLDER COMMAND...

FOLDER: removed with the engine; empty for none.
LIFELINE: the read end of a pipe that nobody writes to. The system closes it with kvgate, however kvgate ends, also by SIGKILL.
The engine must lead its own process group. A pipe needs no Linux-only call, reaches all of vLLM's processes and not only the
first, and does not depend on which thread started the engine, as PR_SET_PDEATHSIG does.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time

LOOK_SECONDS = 0.5
GRACE_SECONDS = 10.0


def signal_group(group: int, number: int) -> bool:
    """False where the group has no process left."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
        return False
    return True


def end_group(group: int) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    alive = signal_group(group, signal.SIGTERM)
    while alive and time.monotonic() < deadline:
        time.sleep(0.1)
        alive = signal_group(group, 0)
    if alive:
        signal_group(group, signal.SIGKILL)


def watch(lifeline: int, engine: int) -> None:
    """Until kvgate's end or the engine's; either way nothing of the engine's group is left."""
    closed: list[int] = []
    while not closed and os.getppid() == engine:
        closed, _, _ = select.select([lifeline], [], [], LOOK_SECONDS)
    end_group(engine)


def main(lifeline: int, folder: str, command: list[str]) -> None:
    engine = os.getpid()
    if os.fork() == 0:
        os.setsid()  # out of the group that it may have to kill
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        watch(lifeline, engine)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
    os.close(lifeline)
    try:
        os.execvp(command[0], command)  # noqa: S606 - an argument list that kvgate built
    except OSError as error:
        raise SystemExit(f"{command[0]} cannot be run: {error.strerror}") from error


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
