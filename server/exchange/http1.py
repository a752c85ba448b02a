"""HTTP/1.1 heads and framing, as bytes: which headers pass, and how a request or an answer is written."""

from __future__ import annotations

import http
from collections.abc import Iterable

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
NOT_TO_ENGINE = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"accept-encoding", b"x-request-id"}
NOT_TO_CLIENT = HOP_BY_HOP | {b"content-length", b"x-request-id", b"x-kvgate-replica", b"x-kvgate-delivered-tokens"}

_USUAL = (b"keep-alive", b"Keep-Alive", b"close")  # what a Connection header nearly always says

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


def _lines(headers: list[Header], dropped: frozenset[bytes]) -> list[bytes]:
    """The header lines that pass, in their order."""
    lines: list[bytes] = []
    for name, value in headers:
        if name not in dropped:
            lines += (name, b": ", value, b"\r\n")
        elif name == b"connection" and value not in _USUAL and (named := connection_tokens(value)) - dropped:
            return _lines(headers, dropped | named)
    return lines


def request_head(
    target: bytes, host: bytes, length: int, request_id: bytes, headers: list[Header], extra: bytes = b""
) -> bytes:
    """The head of a POST to an engine: the client's end-to-end headers in their order, `extra` lines, the framing ours."""
    return b"".join(
        (
            b"POST ",
            target,
            b" HTTP/1.1\r\nhost: ",
            host,
            b"\r\ncontent-length: %d\r\n" % length,
            *_lines(headers, NOT_TO_ENGINE),
            extra,
            b"x-request-id: ",
            request_id,
            b"\r\n\r\n",
        )
    )


def response_head(status: int, headers: list[Header], extra: Iterable[bytes], keep_alive: bool) -> bytes:
    """The head of an answer: the engine's end-to-end headers in their order, then whole lines of ours, the framing among them."""
    return b"".join(
        (
            STATUS_LINE.get(status) or _status_line(status),
            *_lines(headers, NOT_TO_CLIENT),
            *extra,
            b"\r\n" if keep_alive else b"connection: close\r\n\r\n",
        )
    )


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body. `data` is never empty: that would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)
