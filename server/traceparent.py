"""W3C Trace Context: the headers that carry a trace from one service to the next (https://www.w3.org/TR/trace-context-2/)."""

from __future__ import annotations

import re
from typing import NamedTuple

SAMPLED = 0x01
RANDOM = 0x02  # the trace id's last 56 bits are random
_KNOWN_FLAGS = SAMPLED | RANDOM

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?")
_KEY = rb"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
_MEMBER = re.compile(rb"(" + _KEY + rb")=[ -+\--<>-~]{0,255}[!-+\--<>-~]")
_MAX_MEMBERS = 32
_MAX_STATE_BYTES = 8192


class Parent(NamedTuple):
    """The caller's span. `state` is its tracestate, checked; empty if it sent none, or none that is valid."""

    trace_id: int
    span_id: int
    flags: int
    state: bytes


def read_parent(headers: list[tuple[bytes, bytes]]) -> Parent | None:
    """From a request's headers, names in lower case. None where there is no traceparent, or more than one, or a malformed one."""
    given: bytes | None = None
    states: list[bytes] = []
    for name, value in headers:
        if name == b"traceparent":
            if given is not None:
                return None
            given = value
        elif name == b"tracestate":
            states.append(value)
    if given is None or (match := _TRACEPARENT.fullmatch(given.strip(b" \t"))) is None:
        return None
    version, trace, span, flags, more = match.groups()
    # a version that is not known yet may add fields after these four; 00 has none, and ff does not exist
    if version == b"ff" or (version == b"00" and more is not None):
        return None
    trace_id, span_id = int(trace, 16), int(span, 16)
    if not (trace_id and span_id):
        return None
    state = b",".join(states)
    return Parent(trace_id, span_id, int(flags, 16) & _KNOWN_FLAGS, state if _is_valid(state) else b"")


def header_lines(trace_id: int, span_id: int, flags: int, state: bytes = b"") -> bytes:
    """The lines for the next service: traceparent, and tracestate if there is one."""
    line = b"traceparent: 00-%032x-%016x-%02x\r\n" % (trace_id, span_id, flags)
    return line + b"tracestate: %b\r\n" % state if state else line


def _is_valid(state: bytes) -> bool:
    """Members `key=value` in a list; empty ones are allowed, equal keys are not."""
    if not state or len(state) > _MAX_STATE_BYTES:
        return False
    members = [member for member in (part.strip(b" \t") for part in state.split(b",")) if member]
    matches = [_MEMBER.fullmatch(member) for member in members]
    keys = {match[1] for match in matches if match is not None}
    return 0 < len(keys) == len(members) <= _MAX_MEMBERS
