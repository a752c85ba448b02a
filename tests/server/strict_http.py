"""HTTP/1.1 messages out of bytes, by the letter of RFC 9112: the judge in the fuzz tests, with no code of the gateway in it.

It is stricter than h11, which takes a bare LF for a line's end. It gives way in three points, none of which moves the border
of a message: CR and LF before a request line, several blanks inside it (RFC 9112, sections 2.2 and 3), and the names RTSP
and ICE for the protocol, which llhttp takes for HTTP and does not tell.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Fields = list[tuple[bytes, bytes]]  # lower-cased name, value without the blanks around it

MAX_DIGITS = 19  # of a length: what is longer may not fit in 64 bits

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_QUOTED = rb'"(?:[\t \x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t\x20-\x7e\x80-\xff])*"'
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb") +([!-~]+) +(?:HTTP|RTSP|ICE)/1\.([01])")
_STATUS_LINE = re.compile(rb"(?:HTTP|RTSP)/[0-9]\.[0-9] ([1-9][0-9]{2})(?: [^\r\n]*)?")
_FIELD = re.compile(rb"(" + _TOKEN + rb"):([\t\x20-\x7e\x80-\xff]*)")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]+)(?:;" + _TOKEN + rb"(?:=(?:" + _TOKEN + rb"|" + _QUOTED + rb"))?)*")
_DIGITS = re.compile(rb"[0-9]+")


class Malformed(Exception):
    """The bytes cannot become a message, whatever follows."""


class Incomplete(Exception):
    """They are the beginning of a message, or may be one."""


@dataclass(frozen=True)
class Request:
    method: bytes
    target: bytes
    http10: bool
    fields: Fields
    body: bytes


@dataclass(frozen=True)
class Response:
    """A final answer to a POST. `size` counts all bytes up to its end, interim answers included."""

    status: int
    fields: Fields
    body: bytes
    size: int


@dataclass(frozen=True)
class Reading:
    """Requests up to the first fault. `end` is what comes behind them: nothing, or why reading stops.

    closed: the last one asked to close the connection, so that what follows it is no request.
    """

    requests: list[Request]
    end: Literal["border", "incomplete", "malformed", "closed"]


def read_requests(data: bytes) -> Reading:
    """What a connection carried."""
    found: list[Request] = []
    at = 0
    try:
        while True:
            at = _behind_empty_lines(data, at)
            if at == len(data):
                return Reading(found, "border")
            request, at = _request(data, at)
            found.append(request)
            if request.http10 or b"close" in tokens(request.fields, b"connection") or request.method == b"CONNECT":
                return Reading(found, "closed")
    except Malformed:
        return Reading(found, "malformed")
    except Incomplete:
        return Reading(found, "incomplete")


def read_response(data: bytes, ended: bool) -> Response:
    """The final answer to a POST; `ended`: the sender closed the connection behind `data`, orderly.

    Of the status line only the status counts: nothing else of it is passed on. Empty lines before it do no harm.
    """
    at = 0
    while True:
        at = _behind_empty_lines(data, at)
        line, fields, at = _head(data, at)
        match = _STATUS_LINE.fullmatch(line)
        if match is None:
            raise Malformed("status line")
        status = int(match[1])
        if status >= 200:
            break
        if status == 101:
            raise Malformed("a switch that nobody asked for")
    length = _length(fields, http10=False)
    if status in (204, 304):
        return Response(status, fields, b"", at)
    if length is None:
        if not ended:
            raise Incomplete
        return Response(status, fields, data[at:], len(data))
    body, at = _body(data, at, length)
    return Response(status, fields, body, at)


def tokens(fields: Fields, name: bytes) -> set[bytes]:
    """The members of a list header."""
    return {part.strip().lower() for field, value in fields if field == name for part in value.split(b",")}


def _request(data: bytes, at: int) -> tuple[Request, int]:
    line, fields, at = _head(data, at)
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise Malformed("request line")
    method, target, http10 = match[1], match[2], match[3] == b"0"
    hosts = [value for name, value in fields if name == b"host"]
    if len(hosts) > 1 or (not hosts and not http10):
        raise Malformed("host")
    length = _length(fields, http10)
    body, at = _body(data, at, 0 if length is None else length)
    return Request(method, target, http10, fields, body), at


def _behind_empty_lines(data: bytes, at: int) -> int:
    while data[at : at + 1] in (b"\r", b"\n"):
        at += 1
    return at


def _head(data: bytes, at: int) -> tuple[bytes, Fields, int]:
    end = data.find(b"\r\n\r\n", at)
    if end < 0:
        raise Incomplete
    first, *lines = data[at:end].split(b"\r\n")
    return first, [_field(line) for line in lines], end + 4


def _field(line: bytes) -> tuple[bytes, bytes]:
    match = _FIELD.fullmatch(line)
    if match is None:
        raise Malformed("header line")
    return match[1].lower(), match[2].strip(b" \t")


def _length(fields: Fields, http10: bool) -> int | Literal["chunked"] | None:
    lengths = [value for name, value in fields if name == b"content-length"]
    codings = [value.lower() for name, value in fields if name == b"transfer-encoding"]
    if codings:
        if lengths or http10 or codings != [b"chunked"]:
            raise Malformed("transfer-encoding")
        return "chunked"
    if not lengths:
        return None
    if len(lengths) > 1 or not _DIGITS.fullmatch(lengths[0]):
        raise Malformed("content-length")
    digits = lengths[0].lstrip(b"0")
    if len(digits) > MAX_DIGITS:
        raise Malformed("content-length")
    return int(digits or b"0")


def _body(data: bytes, at: int, length: int | Literal["chunked"]) -> tuple[bytes, int]:
    if length != "chunked":
        if len(data) < at + length:
            raise Incomplete
        return data[at : at + length], at + length
    body = b""
    while True:
        line, at = _line(data, at)
        match = _CHUNK_LINE.fullmatch(line)
        if match is None:
            raise Malformed("chunk")
        size = int(match[1], 16)
        if size >= 2**64:
            raise Malformed("chunk size")
        if size == 0:
            break
        if len(data) < at + size + 2:
            raise Incomplete if data[at + size :] in (b"", b"\r") else Malformed("chunk end")
        if data[at + size : at + size + 2] != b"\r\n":
            raise Malformed("chunk end")
        body += data[at : at + size]
        at += size + 2
    while True:
        line, at = _line(data, at)
        if not line:
            return body, at
        _field(line)  # a trailer


def _line(data: bytes, at: int) -> tuple[bytes, int]:
    end = data.find(b"\r\n", at)
    if end < 0:
        raise Incomplete
    return data[at:end], end + 2
