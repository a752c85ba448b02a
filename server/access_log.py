"""The access log: one JSON line for each request, built on the request path (microseconds) and written off it.

Lines hold names, numbers and ids: never prompt text, keys, query strings, or a client's header other than a vetted
x-request-id and the trace id of a valid traceparent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import orjson

from server.log_file import LogFile
from server.record import RequestRecord

logger = logging.getLogger("kvgate")

OFF = "off"
MAX_BYTES = 8 * 1024 * 1024  # some 20,000 lines wait at most while the disk does not take them
_BUFFER_BYTES = 256 * 1024  # grows by doubling
CLOSE_SECONDS = 2.0


class AccessLog:
    """`target` is "off", "-" for stdout, or a path; raises UsageError where it cannot be opened.

    `enabled`: whether a record is worth making. `lost` counts the lines dropped since the start, because the disk was stuck or
    full; a line {"time": ..., "lost": n} tells of them once it is not. `clock`: seconds since the epoch.
    `max_bytes` bounds what waits to be written; about as much again may be in the writer's hands.
    """

    def __init__(self, target: str, clock: Callable[[], float] = time.time, max_bytes: int = MAX_BYTES) -> None:
        self._file = None if target == OFF else LogFile(target)
        self._clock = clock
        self._max_bytes = max_bytes
        # Lines are copied into memory that is there: kept one by one, their page faults cost more than all the rest
        size = min(_BUFFER_BYTES, max_bytes)
        self._buffer, self._spare = bytearray(size), bytearray(size)
        self._used = 0
        self._dropped = 0  # by us; the file counts its own
        self._told = 0
        self._second = -1
        self._prefix = ""
        self.enabled = self._file is not None

    @property
    def lost(self) -> int:
        return self._dropped + (self._file.lost if self._file is not None else 0)

    def write(self, r: RequestRecord) -> None:
        """Takes note of a finished request. Never waits and never raises."""
        if not self.enabled:
            return
        fields = {
            "time": self._time(r.ended),
            "request_id": r.request_id.decode("latin-1"),
            "route": r.route,
            "model": r.model,
            "tenant": r.tenant,
            "key_id": r.key_id,
            "replica": r.replica,
            "status": r.status,
            "stream": r.stream,
            "prompt_tokens": r.prompt_tokens,
            "cached_tokens": r.cached_tokens,
            "output_tokens": r.output_tokens,
            "ttft_ms": None if r.ttft is None else int(r.ttft * 1e6) / 1e3,
            "duration_ms": None if r.duration is None else int(r.duration * 1e6) / 1e3,
            "queue_ms": None if r.queue is None else int(r.queue * 1e6) / 1e3,
            "overhead_us": None if r.overhead is None else int(r.overhead * 1e6),
            "retries": r.retries,
            "request_bytes": r.request_bytes,
            "answer_bytes": r.answer_bytes,
            "reason": r.reason,
            "trace_id": r.trace_id,
        }
        try:
            line = orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)
        except orjson.JSONEncodeError:  # a name that is not valid Unicode; its request is finished all the same
            self._dropped += 1
            return
        if not self._append(line):
            self._dropped += 1

    def flush(self) -> None:
        """Hands what has gathered to the writer, unless it still has the last batch. Call it twice a second or more."""
        if self.enabled:
            self._hand_over()

    def reopen(self) -> None:
        """Opens the path anew before the next line, as after a rotation (SIGHUP). It happens by itself within a second, too."""
        if self._file is not None:
            self._file.reopen()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Writes what is left; blocks for at most `seconds`. Nothing may be written to it afterwards."""
        if self._file is None or not self.enabled:
            return
        self.enabled = False
        deadline = time.monotonic() + seconds
        while self._file.busy and time.monotonic() < deadline:
            time.sleep(0.005)
        self._hand_over()
        if not self._file.close(max(0.0, deadline - time.monotonic())):
            logger.warning("the access log's last lines could not be written within %g s", seconds)

    def _hand_over(self) -> None:
        assert self._file is not None
        if self._file.busy:
            return
        lost = self.lost
        if lost != self._told and not self._file.failing:
            note = {"time": self._time(self._clock()), "lost": lost - self._told}
            if self._append(orjson.dumps(note, option=orjson.OPT_APPEND_NEWLINE)):
                logger.warning("%d lines of the access log were lost", lost - self._told)
                self._told = lost
        if self._used:
            batch = memoryview(self._buffer)[: self._used]
            self._buffer, self._spare = self._spare, self._buffer  # the writer is done with the spare
            self._used = 0
            self._file.give(batch)

    def _append(self, line: bytes) -> bool:
        end = self._used + len(line)
        if end > len(self._buffer) and not self._grow(end):
            return False
        self._buffer[self._used : end] = line
        self._used = end
        return True

    def _grow(self, size: int) -> bool:
        if size > self._max_bytes:
            return False
        larger = bytearray(min(max(size, 2 * len(self._buffer)), self._max_bytes))
        larger[: self._used] = memoryview(self._buffer)[: self._used]
        self._buffer = larger
        return True

    def _time(self, epoch: float) -> str:
        """RFC 3339 in UTC with milliseconds. The text of a second is made once."""
        milliseconds = int(epoch * 1000)
        second = milliseconds // 1000
        if second != self._second:
            self._second = second
            self._prefix = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._prefix}.{milliseconds % 1000:03d}Z"
