"""HTTP/1.1 heads and framing, as bytes: which headers pass, and how a request or an answer is written.

Every header is looked at once: a head is classified in the one pass that also makes the lines that go on.
"""

from __future__ import annotations

import http
import re
from collections.abc import Container, Iterable

Header = tuple[bytes, bytes]  # lower-cased name, value

# RFC 9110 section 7.6.1, plus what the gateway states itself: framing, the host, and an encoding that it can read
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
KEYS = frozenset((b"authorization", b"x-api-key"))  # of clients; what an engine is shown is the credentials' business
NOT_TO_ENGINE = HOP_BY_HOP | KEYS | {b"host", b"content-length", b"expect", b"accept-encoding", b"x-request-id"}
NOT_TO_CLIENT = HOP_BY_HOP | {
    b"content-length",
    b"x-request-id",
    b"x-kvgate-replica",
    b"x-kvgate-routed-tokens",
    b"x-kvgate-delivered-tokens",
    b"x-kvgate-decision",
}

MAX_LENGTH_DIGITS = 20  # of a Content-Length: as many as the parser counts up to
_USUAL = (b"keep-alive", b"Keep-Alive", b"close")  # what a Connection header nearly always says
_SAFE_ID = re.compile(rb"[!-~]{1,128}\Z")

BODILESS = frozenset((204, 304))  # statuses whose answers have no body, and a 204 no framing
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def _status_line(status: int) -> bytes:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode("ascii")


STATUS_LINE = {status: _status_line(status) for status in range(200, 600)}


def connection_tokens(value: bytes) -> frozenset[bytes]:
    """Names that a Connection header declares hop by hop, beyond the two everyone sends."""
    return frozenset(token.strip().lower() for token in value.split(b",")) - {b"", b"close", b"keep-alive"}


class RequestHead:
    """What the headers of a client's request say.

    lines: the headers that go to the engine, in their order, in pieces. keys: those that show a key. request_id: the
    client's own, if it sent one that is safe to repeat. length: of the body in bytes, None where only its end will tell.
    expects: it waits for a word before it sends its body (Expect: 100-continue).
    """

    __slots__ = ("_codings", "_hosts", "_long", "expects", "keys", "length", "lines", "request_id")

    def __init__(self, headers: Iterable[Header]) -> None:
        self.lines: list[bytes] = []
        self.keys: list[Header] = []
        self.request_id = b""
        self.length: int | None = None
        self.expects = False
        self._hosts = 0
        self._codings: list[bytes] | None = None
        self._long = False  # a length that no parser counts to
        named: frozenset[bytes] = frozenset()
        lines, dropped = self.lines, NOT_TO_ENGINE
        for header in headers:
            name, value = header
            if name not in dropped:
                lines += (name, b": ", value, b"\r\n")
            elif name == b"host":
                self._hosts += 1
            elif name == b"content-length":
                if len(value) > MAX_LENGTH_DIGITS:
                    self._long = True
                else:
                    self.length = int(value)
            elif name in KEYS:
                self.keys.append(header)
            elif name == b"x-request-id":
                if not self.request_id and _SAFE_ID.match(value):
                    self.request_id = value
            elif name == b"expect":
                self.expects = self.expects or value.lower() == b"100-continue"
            elif name == b"transfer-encoding":
                self._codings = [*(self._codings or ()), value]
            elif name == b"connection" and value not in _USUAL:
                named |= connection_tokens(value)
        if named - dropped:
            self.lines = without(lines, named)

    def fault(self, version: str) -> str | None:
        """What RFC 9112 forbids in such a head though the parser takes it: a sentence, or None.

        A proxy in front of the gateway may see other borders between requests in such a head.
        """
        if version not in ("1.1", "1.0"):
            return "The request is not HTTP/1.1."
        if self._codings is not None and (
            version == "1.0" or any(coding.strip().lower() != b"chunked" for coding in self._codings)
        ):
            return "The request's Transfer-Encoding is not chunked, or not allowed in its version of HTTP."
        if self._long:
            return "The request's Content-Length is not valid."
        if self._hosts > 1 or (self._hosts == 0 and version == "1.1"):
            return "The request has no Host header, or more than one."
        return None


class AnswerHead:
    """What the head of an engine's answer says.

    lines: the headers that go to the client, in their order, in pieces. length: of the body in bytes, None where only its
    end will tell. chunked: framed so. events: it is a stream of server-sent events. Raises ValueError for a framing that
    nobody agrees on.
    """

    __slots__ = ("chunked", "events", "length", "lines", "status")

    def __init__(self, status: int, headers: Iterable[Header]) -> None:
        self.status = status
        self.length: int | None = None
        self.chunked = False
        self.events = False
        self.lines: list[bytes] = []
        named: frozenset[bytes] = frozenset()
        lines, dropped = self.lines, NOT_TO_CLIENT
        for name, value in headers:
            if name not in dropped:
                lines += (name, b": ", value, b"\r\n")
                if name == b"content-type" and value.startswith(b"text/event-stream"):
                    self.events = True
            elif name == b"content-length":
                self.length = int(value)
            elif name == b"transfer-encoding":
                if self.chunked or value.strip().lower() != b"chunked":
                    raise ValueError(f"transfer-encoding {value!r}")
                self.chunked = True
            elif name == b"connection" and value not in _USUAL:
                named |= connection_tokens(value)
        if named - dropped:
            self.lines = without(lines, named)
        if status in BODILESS:
            self.length = 0


def without(lines: list[bytes], names: Container[bytes]) -> list[bytes]:
    """Header lines, in pieces of four as the heads have them, less those with one of these names."""
    kept: list[bytes] = []
    for at in range(0, len(lines), 4):
        if lines[at] not in names:
            kept += lines[at : at + 4]
    return kept


def request_head(
    target: bytes, host: bytes, length: int, request_id: bytes, lines: Iterable[bytes], extra: bytes = b""
) -> bytes:
    """The head of a POST to an engine: the client's header `lines`, `extra` ones, the framing ours."""
    return b"".join(
        (
            b"POST ",
            target,
            b" HTTP/1.1\r\nhost: ",
            host,
            b"\r\ncontent-length: %d\r\n" % length,
            *lines,
            extra,
            b"x-request-id: ",
            request_id,
            b"\r\n\r\n",
        )
    )


def response_head(head: AnswerHead, extra: Iterable[bytes], keep_alive: bool) -> bytes:
    """The head of an answer: the engine's end-to-end headers in their order, then whole lines of ours, the framing among them."""
    return b"".join(
        (
            STATUS_LINE.get(head.status) or _status_line(head.status),
            *head.lines,
            *extra,
            b"\r\n" if keep_alive else b"connection: close\r\n\r\n",
        )
    )


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body. `data` is never empty: that would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)
