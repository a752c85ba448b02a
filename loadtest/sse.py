"""Server-sent events from bytes, in whatever pieces they come. Sans I/O.

Lines end in LF, CRLF or CR and are looked at only when complete, so a character that was split between two pieces is
whole again before it is decoded, and text that contains `data: [DONE]` is never taken for the end.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    data: str

    @property
    def done(self) -> bool:
        """OpenAI's end mark: the whole of the data, never a part of it."""
        return self.data == "[DONE]"


class EventParser:
    """`feed` returns the events that this piece completed. One that the end of the stream cuts off is never given."""

    def __init__(self) -> None:
        self._rest = b""
        self._skip_lf = False
        self._name = ""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[Event]:
        events: list[Event] = []
        for line in self._lines(piece):
            if not line:
                if self._data:
                    events.append(Event(self._name or "message", "\n".join(self._data)))
                self._name, self._data = "", []
                continue
            field, _, value = line.partition(b":")
            text = value.removeprefix(b" ").decode("utf-8", errors="replace")
            if field == b"data":
                self._data.append(text)
            elif field == b"event":
                self._name = text
        return events

    def _lines(self, piece: bytes) -> list[bytes]:
        if self._skip_lf and piece:
            # the CR that ended the last piece was the first half of a CRLF
            piece = piece.removeprefix(b"\n")
            self._skip_lf = False
        buffer = self._rest + piece
        if buffer.endswith(b"\r"):
            self._skip_lf = True
        *lines, self._rest = buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        return lines
