"""What a person sees while an engine starts: elapsed seconds and the phase, from the engine's log."""

from __future__ import annotations

from typing import TextIO

LINE_SECONDS = 5.0  # between two lines where nobody watches, as in CI


class StartProgress:
    """On a terminal one line that is rewritten; elsewhere a line every LINE_SECONDS, and one when it is over."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self._live = stream.isatty()
        self._next = 0.0

    def update(self, seconds: float, phase: str) -> None:
        text = f"{self._name}: {phase}, {seconds:.0f} s"
        if self._live:
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()
        elif seconds >= self._next:
            self._next = seconds + LINE_SECONDS
            self._stream.write(text + "\n")
            self._stream.flush()

    def clear(self) -> None:
        """Leaves the terminal's line free for what is said next."""
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def end(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{self._name}: {text}\n" if self._live else f"{self._name}: {text}\n")
        self._stream.flush()
