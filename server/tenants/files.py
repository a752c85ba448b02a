"""Changes the key file so that a reader sees the old file or the new one, and no change is lost to another."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvgate.errors import UsageError
from server.tenants.keys import WRITABLE_BY_OTHERS

PRIVATE = 0o600


@dataclass(slots=True)
class ChangedFile:
    """`data` is what the file holds, to be replaced by what it shall hold."""

    data: bytes


@contextmanager
def changing(path: Path, new: bytes | None = None) -> Iterator[ChangedFile]:
    """Holds the file's folder locked, then puts `data` in place by a rename; after an exception nothing has changed.

    A file that is not there begins with `new`, mode 0600. One that is keeps its owner and mode, so that the gateway can
    still read it, less the right of others to write. A link stays one. UsageError where the file cannot be changed.
    """
    try:
        path = path.resolve()
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UsageError(f"{path.parent}: {error.strerror or error}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        before = _state(path)
        if before is None and new is None:
            raise UsageError(f"{path} is not there")
        try:
            file = ChangedFile(new or b"" if before is None else path.read_bytes())
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
        yield file
        try:
            _replace(path, file.data, before)
            os.fsync(folder)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        os.close(folder)  # and with it the lock


def _state(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _replace(path: Path, data: bytes, before: os.stat_result | None) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if before is not None:
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode) & ~WRITABLE_BY_OTHERS)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
