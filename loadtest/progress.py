"""Progress for a person: a bar on a terminal, a line a phase otherwise. Always on a stream of its own, never stdout."""

from __future__ import annotations

import sys
from time import monotonic
from typing import TextIO

from loadtest.outcome import Outcome

_WIDTH = 28
_PLAIN_EVERY_S = 15.0


class Progress:
    """`begin`, `advance` for each outcome, `end`; `note` for a sentence. Without a stream it is silent."""

    def __init__(self, stream: TextIO | None = None, *, bar: bool | None = None) -> None:
        self._stream = stream
        self._bar = stream is not None and stream.isatty() if bar is None else bar
        self._title, self._total, self._done, self._failed = "", 0, 0, 0
        self._began = self._spoke = 0.0

    @classmethod
    def on_stderr(cls) -> Progress:
        return cls(sys.stderr)

    def note(self, text: str) -> None:
        self._write(text + "\n")

    def begin(self, title: str, total: int) -> None:
        self._title, self._total, self._done, self._failed = title, total, 0, 0
        self._began = self._spoke = monotonic()
        if not self._bar:
            self._write(f"{title}: {total} requests\n")
        self._draw()

    def advance(self, outcome: Outcome) -> None:
        self._done += 1
        self._failed += not outcome.ok
        self._draw()
        if not self._bar and monotonic() - self._spoke > _PLAIN_EVERY_S:
            self._spoke = monotonic()
            self._write(f"{self._title}: {self._state()}\n")

    def end(self) -> None:
        self._draw()
        self._write("\n" if self._bar else f"{self._title}: {self._state()}, done\n")

    def _state(self) -> str:
        failed = f", {self._failed} failed" if self._failed else ""
        return f"{self._done}/{self._total}{failed}, {monotonic() - self._began:.0f} s"

    def _draw(self) -> None:
        if self._bar:
            full = _WIDTH * self._done // max(self._total, 1)
            self._write(f"\r\x1b[2K{'█' * full}{'░' * (_WIDTH - full)} {self._title}: {self._state()}")

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()
