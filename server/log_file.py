"""Where the access log's lines go: a file or stdout, written by a thread of its own so that no disk or pipe stops the gateway."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread
from time import monotonic

from kvgate.errors import UsageError

logger = logging.getLogger("kvgate")

# Without O_NONBLOCK the start would wait for the reader of a named pipe
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
_MODE = 0o640
_NEWLINE = 10
_LOOK_SECONDS = 1.0
_COMPLAIN_SECONDS = 60.0


class LogFile:
    """Appends batches of lines to `target`: a path, or "-" for stdout. Raises UsageError where it cannot be opened.

    A path that was renamed or removed is opened anew within a second (by inode), or at once after `reopen`. `busy` while a
    batch is being written; `lost` counts the lines that could not be; `failing`: the last batch was such. `clock`: monotonic
    seconds.
    """

    def __init__(self, target: str, clock: Callable[[], float] = monotonic) -> None:
        self._path = None if target == "-" else target
        self._clock = clock
        self._fd = self._open_first()
        self._reopen = False
        self._looked = clock()
        self._complained: float | None = None
        self._torn = False  # the last line written lacks its end
        self._closing = Event()
        self._given = self._done = 0
        self._batches: SimpleQueue[memoryview | None] = SimpleQueue()
        self._thread: Thread | None = None
        self.lost = 0
        self.failing = False

    @property
    def busy(self) -> bool:
        return self._given != self._done

    def give(self, batch: memoryview) -> None:
        """Takes whole lines and returns at once. While it is `busy` the memory is its own, and it takes no more."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="access-log", daemon=True)
            self._thread.start()
        self._given += 1
        self._batches.put(batch)

    def reopen(self) -> None:
        """Opens the path anew before the next line."""
        self._reopen = True

    def close(self, seconds: float) -> bool:
        """Waits at most so long for what was given. False if it was not written by then: its lines are lost."""
        self._closing.set()
        if self._thread is not None:
            self._batches.put(None)
            self._thread.join(seconds)
            if self._thread.is_alive():  # it holds the file; as a daemon it ends with the process
                return False
        os.close(self._fd)
        return True

    # -- at the start

    def _open_first(self) -> int:
        try:
            if self._path is not None:
                return os.open(self._path, _FLAGS, _MODE)
            if sys.__stdout__ is None:  # closed by the caller: what has its number now is something else
                raise UsageError("--access-log -: there is no stdout")
            return os.dup(1)
        except OSError as error:
            raise UsageError(f"--access-log {self._path or '-'}: {error.strerror}") from error

    # -- in the thread

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                self._follow_rotation()
                self._write(batch)
                self.failing = False
            except OSError as error:
                self.failing = True
                self._complain("the access log cannot be written: %s; lines are lost", error.strerror)
            del batch
            self._done += 1

    def _follow_rotation(self) -> None:
        now = self._clock()
        if self._path is None or not (self._reopen or now - self._looked >= _LOOK_SECONDS):
            return
        self._looked = now
        if not self._reopen and _same_file(self._path, self._fd):
            return
        self._reopen = False
        try:
            fd = os.open(self._path, _FLAGS, _MODE)
        except OSError as error:  # the old file is better than none
            self._complain("the access log cannot be opened anew: %s; the old file is kept", error.strerror)
            return
        os.close(self._fd)
        self._fd, self._torn = fd, False

    def _write(self, batch: memoryview) -> None:
        at = 0
        try:
            if self._torn:
                self._write_some(b"\n")
                self._torn = False
            while at < len(batch):
                at += self._write_some(batch[at:])
        except OSError:
            if at:
                self._torn = batch[at - 1] != _NEWLINE
            self.lost += bytes(batch[at:]).count(b"\n")
            raise

    def _write_some(self, data: bytes | memoryview) -> int:
        while True:
            try:
                return os.write(self._fd, data)
            except BlockingIOError:  # somebody else made this pipe non-blocking, or it is a named one
                self._wait_for_room()

    def _wait_for_room(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        if not poll.poll(500) and self._closing.is_set():
            raise TimeoutError(0, "its reader does not read")

    def _complain(self, text: str, why: str | None) -> None:
        """At most once a minute."""
        now = self._clock()
        if self._complained is None or now - self._complained >= _COMPLAIN_SECONDS:
            self._complained = now
            logger.warning(text, why)


def _same_file(path: str, fd: int) -> bool:
    """Whether `path` still names the open file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(fd))
    return False
