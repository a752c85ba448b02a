"""Programs that come from Debian, for the benchmark and the tests: found, or installed where that is possible.

python -m bench.debian redis-server     # before the tests; who is not root is told what is missing, and they are skipped
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvgate.errors import SetupError

PACKAGES = {"nginx": "nginx-light", "wrk": "wrk", "redis-server": "redis-server"}
SEARCH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
POLICY = Path("/usr/sbin/policy-rc.d")


def program(name: str) -> str:
    """Where `name` is; SetupError names the package if it is not there."""
    path = shutil.which(name, path=SEARCH)
    if path is None:
        raise SetupError(f"{name} is missing: install it with `apt-get install {PACKAGES[name]}`.")
    return path


def version(name: str) -> str:
    """What `name -v` says; wrk exits with 1 after it."""
    shown = subprocess.run([program(name), "-v"], capture_output=True, text=True, check=False, timeout=10)
    found = re.search(r"\d+\.[\w.+~-]+", shown.stdout + shown.stderr)
    return found[0] if found else "unknown"


def ensure(names: Sequence[str], who: str = "bench") -> None:
    """Installs what `who` misses, if this is root on a Debian; else SetupError. No service is started by it."""
    if not _missing(names):
        return
    with (Path(tempfile.gettempdir()) / "kvgate-debian.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if missing := _missing(names):
            _install(missing, who)


def _missing(names: Sequence[str]) -> list[str]:
    return [PACKAGES[name] for name in names if shutil.which(name, path=SEARCH) is None]


def _install(missing: Sequence[str], who: str) -> None:
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        raise SetupError(f"{who} needs {', '.join(missing)}: install with `sudo apt-get install {' '.join(missing)}`.")
    print(f"{who}: installing from Debian: {' '.join(missing)}", file=sys.stderr)
    with no_services():
        for command in ([apt, "update"], [apt, "install", "-y", "--no-install-recommends", *missing]):
            run = subprocess.run(
                command,
                env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
                capture_output=True,
                text=True,
                check=False,
                timeout=600,
            )
            if run.returncode != 0:
                raise SetupError(f"`{' '.join(command)}` failed.\n{(run.stdout + run.stderr)[-2000:]}")


@contextmanager
def no_services(policy: Path = POLICY) -> Iterator[None]:
    """Keeps Debian's package scripts from starting a server, unless the system has a policy of its own.

    101 is policy-rc.d's "action forbidden". Where an administrator's policy is in place it is left to decide.
    """
    if policy.exists():
        yield
        return
    with tempfile.NamedTemporaryFile("w", dir=policy.parent, prefix="policy-rc.d.", delete=False) as file:
        file.write("#!/bin/sh\nexit 101\n")
    try:
        os.chmod(file.name, 0o755)
        os.rename(file.name, policy)
        yield
    finally:
        Path(file.name).unlink(missing_ok=True)
        policy.unlink(missing_ok=True)


if __name__ == "__main__":
    try:
        ensure(sys.argv[1:], "the tests")
    except SetupError as error:
        print(error, file=sys.stderr)
