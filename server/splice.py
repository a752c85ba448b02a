"""Changing a JSON body without writing it anew: spans are cut out of the received bytes and others put in their place.

Only the top level is looked at (and one object in it), so that a value keeps every blank, escape and digit that its sender
chose. The body must have been parsed before: what stands here relies on it being valid JSON, an object with a member.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import orjson

_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_KEY = re.compile(_STRING + rb"(?=\s*:)", re.DOTALL)
_COLON = re.compile(rb"\s*:\s*")
_SCALAR = re.compile(_STRING + rb'|[^\s,\]}"]+', re.DOTALL)
_NESTED = re.compile(_STRING + rb"|[{}\[\]]", re.DOTALL)  # strings are taken whole: a bracket in one is text


class Edit(NamedTuple):
    """`body[start:end]` becomes `text`."""

    start: int
    end: int
    text: bytes


class Member(NamedTuple):
    """A member of an object; offsets of its value in the body."""

    name: str
    start: int
    end: int


def members(body: bytes, start: int = 0) -> Iterator[Member]:
    """The members of the object that begins at or behind `start`, in their order, names decoded, duplicates included."""
    at = body.index(b"{", start) + 1
    while (key := _next_key(body, at)) is not None:
        colon = _COLON.match(body, key.end())
        assert colon is not None
        end = _value_end(body, colon.end())
        raw = key[0]
        name = orjson.loads(raw) if b"\\" in raw else raw[1:-1].decode("utf-8", "replace")
        yield Member(name, colon.end(), end)
        at = end


def _next_key(body: bytes, at: int) -> re.Match[bytes] | None:
    while body[at : at + 1] in (b" ", b"\n", b"\r", b"\t", b","):
        at += 1
    return _KEY.match(body, at)


def _value_end(body: bytes, at: int) -> int:
    if body[at : at + 1] not in (b"{", b"["):
        scalar = _SCALAR.match(body, at)
        assert scalar is not None
        return scalar.end()
    depth = 0
    for token in _NESTED.finditer(body, at):
        first = token[0][0]
        if first in b"{[":
            depth += 1
        elif first in b"}]":
            depth -= 1
            if depth == 0:
                return token.end()
    raise AssertionError("an object without its end was not valid JSON")


def apply(body: bytes, edits: list[Edit]) -> bytes:
    """The body with all edits, which do not overlap."""
    parts: list[bytes] = []
    at = 0
    for edit in sorted(edits):
        parts += (body[at : edit.start], edit.text)
        at = edit.end
    return b"".join((*parts, body[at:]))


def set_members(body: bytes, values: dict[str, bytes], *, insert: bool = True, start: int = 0) -> list[Edit]:
    """Edits after which each of these members has this value (JSON text), wherever and however often it was given.

    With `insert`, a member that is not there is put in behind the last one; else only what is there is changed.
    """
    edits = []
    missing = dict(values)
    last = None
    for last in members(body, start):
        if last.name in values:
            edits.append(Edit(last.start, last.end, values[last.name]))
            missing.pop(last.name, None)
    if insert and missing:
        text = b",".join(b'"%b":%b' % (name.encode(), value) for name, value in missing.items())
        at, comma = (last.end, b",") if last is not None else (body.index(b"{", start) + 1, b"")
        edits.append(Edit(at, at, comma + text))
    return edits


def ask_for_usage(body: bytes) -> list[Edit]:
    """Edits after which a stream ends with a usage chunk (`stream_options.include_usage`)."""
    edits: list[Edit] = []
    found = False
    for member in members(body):
        if member.name != "stream_options":
            continue
        found = True
        if body[member.start : member.start + 1] == b"{":
            edits += set_members(body, {"include_usage": b"true"}, start=member.start)
        else:
            edits.append(Edit(member.start, member.end, b'{"include_usage":true}'))
    return edits if found else set_members(body, {"stream_options": b'{"include_usage":true}'})
