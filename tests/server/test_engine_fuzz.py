"""Any bytes from an engine: the client's answer is HTTP, and one that is cut never looks complete.

Each example is asked for twice on one connection; the second time the engine is well, and no byte of the first answer may
be left over for the second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import behaviours, wire
from tests.fakes.raw_client import post
from tests.server.fuzzing import CHAT, PLAIN, Answer, Rig, echo, rig
from tests.server.strict_http import Incomplete, Malformed, Response, read_response

QUICK = {"deadline": None, "derandomize": True, "database": None}
STREAM = b'{"model":"tiny","messages":[],"stream":true,"stream_options":{"include_usage":true}}'
End = Literal["keep", "close", "reset"]

OK = b"HTTP/1.1 200 OK\r\n"
JSON = b"content-type: application/json\r\n"
EVENTS = b"content-type: text/event-stream; charset=utf-8\r\n"
EVIL = b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nsmuggled"


@pytest.fixture(scope="module")
def shared() -> Iterator[Rig]:
    with rig() as made:
        made.engine.always(echo)
        yield made


def answered(shared: Rig, data: bytes, end: End, splits: list[int], body: bytes) -> tuple[Answer, Response | None]:
    """Holds the property for an engine that sends `data` and then ends so. The client's answer, and what is in `data`."""
    try:
        sent = read_response(data, ended=end == "close")
    except (Malformed, Incomplete):
        sent = None
    request = post(CHAT, body)
    shared.engine.script(behaviours.raw(data, splits, pause=0.0, then=end))
    outcome = shared.send(request, request, in_turn=True)
    first, *others = outcome.answers
    if not first.complete:
        assert sent is None
        assert first.header(b"x-kvgate-replica")
        assert outcome.closed
        assert others == []
        return first, sent
    if first.header(b"x-kvgate-replica"):
        assert sent is not None
        assert (first.status, first.body) == (sent.status, sent.body)
    else:  # the gateway's own
        assert (first.status, json.loads(first.body)["error"]["code"]) == (502, "engine_failed")
    (second,) = others
    assert json.loads(second.body) == {"echo": body.hex()}
    return first, sent


def test_every_place_to_cut_an_answer(shared: Rig) -> None:
    event = b'data: {"choices":[]}\n\n'
    for body, whole in (
        (PLAIN, OK + JSON + b"content-length: 12\r\n\r\n" + b'{"usage":{}}'),
        (PLAIN, OK + JSON + b"transfer-encoding: chunked\r\n\r\n" + wire.chunk(b'{"usage":{}}') + wire.LAST_CHUNK),
        (STREAM, OK + EVENTS + b"transfer-encoding: chunked\r\n\r\n" + wire.chunk(event) * 2 + wire.LAST_CHUNK),
        (STREAM, OK + EVENTS + b"content-length: %d\r\n\r\n" % (2 * len(event)) + event * 2),
    ):
        for at in range(1, len(whole)):
            first, sent = answered(shared, whole[:at], "close", [], body)
            assert sent is None
            assert first.status == 502 or not first.complete
        first, sent = answered(shared, whole, "keep", [*range(1, len(whole))], body)
        assert first.status == 200
        assert first.complete


@pytest.mark.parametrize("body", [PLAIN, STREAM])
@pytest.mark.parametrize(
    ("data", "status"),
    [
        pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", 204, id="204"),
        pytest.param(b"HTTP/1.1 204 No Content\r\n" + EVENTS + b"\r\n", 204, id="204 of events"),
        pytest.param(b"HTTP/1.1 204 No Content\r\ncontent-length: 8\r\n\r\nsmuggled", 204, id="204 with a length"),
        pytest.param(b"HTTP/1.1 204 No Content\r\ntransfer-encoding: chunked\r\n\r\n" + EVIL, 204, id="204 in chunks"),
        pytest.param(b"HTTP/1.1 304 Not Modified\r\n" + EVENTS + b"\r\n" + EVIL, 304, id="304 of events"),
        pytest.param(OK + JSON + b"content-length: 2\r\n\r\n{}" + EVIL, 200, id="a second answer"),
        pytest.param(
            b"HTTP/1.1 100 Continue\r\n\r\n" * 3 + OK + b"content-length: 0\r\n\r\n", 200, id="interim answers"
        ),
        pytest.param(b"HTTP/1.1 101 Switch\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" + EVIL, 502, id="101"),
        pytest.param(b"HTTP/1.1 099 Low\r\ncontent-length: 0\r\n\r\n" + EVIL, 502, id="status 99"),
        pytest.param(b"HTTP/1.1 999 High\r\ncontent-length: 2\r\n\r\n{}", 999, id="status 999"),
        pytest.param(OK + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n", 502, id="TE and CL"),
        pytest.param(OK + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 502, id="CL and TE"),
        pytest.param(OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}x", 502, id="two lengths"),
        pytest.param(OK + b"content-length: -2\r\n\r\n{}", 502, id="negative length"),
        pytest.param(OK + b"content-length: %05000d\r\n\r\n{}" % 2, 502, id="5000 digits of length"),
        pytest.param(OK + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 502, id="TE gzip, chunked"),
        pytest.param(OK + b"transfer-encoding: gzip\r\n\r\n{}", 502, id="TE gzip"),
        pytest.param(OK + b"x: a\nset-cookie: b\r\ncontent-length: 2\r\n\r\n{}", 502, id="bare LF in a value"),
        pytest.param(OK + b"x: a\rset-cookie: b\r\ncontent-length: 2\r\n\r\n{}", 502, id="bare CR in a value"),
        pytest.param(OK + b"x: a\r\n b\r\ncontent-length: 2\r\n\r\n{}", 502, id="folded value"),
        pytest.param(OK + b"x: \x00\r\ncontent-length: 2\r\n\r\n{}", 502, id="NUL in a value"),
        pytest.param(OK + b"x : a\r\ncontent-length: 2\r\n\r\n{}", 502, id="blank before the colon"),
        pytest.param(OK + b"transfer-encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n", 502, id="chunk size with a sign"),
        pytest.param(b"ICY 200 OK\r\n\r\n", 502, id="another protocol"),
    ],
)
def test_odd_answers(shared: Rig, data: bytes, status: int, body: bytes) -> None:
    for splits in ([], [*range(1, len(data))] if len(data) < 1000 else [100]):
        first, _ = answered(shared, data, "close", splits, body)
        assert (first.status, first.complete) == (status, True)


@pytest.mark.parametrize("behind", [EVIL, b"junk", b"\r\n", b"\x00", EVIL[:20]])
@pytest.mark.parametrize(
    "framing", [b"content-length: 2\r\n\r\n{}", b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"]
)
def test_bytes_behind_an_answer_are_nobody_s(shared: Rig, framing: bytes, behind: bytes) -> None:
    whole = OK + JSON + framing
    for splits in ([], [len(whole)], [len(whole) - 1], [len(whole) + 1]):
        first, _ = answered(shared, whole + behind, "keep", splits, PLAIN)
        assert (first.status, first.body) == (200, b"{}")


@pytest.mark.parametrize("kind", [JSON, EVENTS])
def test_a_reset_is_no_end_of_an_answer(shared: Rig, kind: bytes) -> None:
    whole = OK + kind + b"\r\ndata: {}\n\n"
    assert answered(shared, whole, "close", [], STREAM)[0].body == b"data: {}\n\n"
    first, sent = answered(shared, whole, "reset", [], STREAM)
    assert sent is None
    assert first.status == 502 or not first.complete


HEADS = (
    JSON,
    EVENTS,
    EVENTS,
    b"",
    b"x-a: 1\r\n",
    b"connection: close\r\n",
    b"connection: x-a\r\n",
    b"x-kvgate-replica: x\r\n",
)
BODIES = (
    b'{"usage":{"prompt_tokens":3,"completion_tokens":1}}',
    b'data: {"choices":[]}\n\n' * 3,
    b"",
    EVIL,
    b"x" * 3000,
)
LINES = (
    *(b"transfer-encoding: chunked", b"transfer-encoding : chunked", b"transfer-encoding: gzip", b"content-length: 0"),
    *(
        b"content-length: 3",
        b"content-length: +3",
        b"content-length:",
        b"content-length: 99999999999999999999",
        b"x: \n",
    ),
    *(b"x: a\r\n b", b"x\x00: 1", b"x: \x00", b"x: \r", b"connection: upgrade", b"upgrade: h2c", b"connection: close"),
)
PIECES = (*(b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\n\n", b"\x00", b" ", b":", b"0\r\n\r\n", b"ff\r\n", b"-"), EVIL)


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """One answer, right as far as HTTP goes."""
    status = draw(st.sampled_from((b"200", b"200", b"200", b"400", b"503", b"204", b"304")))
    head = b"HTTP/1.1 %b Said\r\n" % status + b"".join(draw(st.lists(st.sampled_from(HEADS), max_size=3, unique=True)))
    body = b"" if status in (b"204", b"304") else draw(st.sampled_from(BODIES))
    interim = b"HTTP/1.1 103 Early\r\nlink: </x>\r\n\r\n" * draw(st.integers(0, 1))
    framing = draw(st.sampled_from(("length", "chunked", "chunked", "end")))
    if framing == "length":
        return interim + head + b"content-length: %d\r\n\r\n" % len(body) + body
    if framing == "end":
        return interim + head + b"\r\n" + body
    size = draw(st.integers(8, 1000)) if len(body) < 1000 else 1000
    chunks = b"".join(wire.chunk(body[at : at + size]) for at in range(0, len(body), size))
    end = draw(st.sampled_from((wire.LAST_CHUNK, b"0\r\nx-sum: 1\r\n\r\n")))
    return interim + head + b"transfer-encoding: chunked\r\n\r\n" + (chunks + end if body or status < b"204" else b"")


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    """An answer with up to two faults put in, or cut."""
    data = draw(answers())
    for _ in range(draw(st.integers(0, 2))):
        kind = draw(st.integers(0, 3))
        at = draw(st.integers(0, len(data) - 1))
        if kind == 0:
            lines = data.split(b"\r\n")
            top = max(1, lines.index(b"") if b"" in lines else 1)
            lines.insert(draw(st.integers(1, top)), draw(st.sampled_from(LINES)))
            data = b"\r\n".join(lines)
        elif kind == 1:
            data = data[:at] + draw(st.sampled_from(PIECES)) + data[at:]
        elif kind == 2:
            data = data[:at] + draw(st.binary(min_size=1, max_size=3)) + data[at + 1 :]
        else:
            data = data[: max(1, at)]
    return data


@settings(max_examples=400, **QUICK)  # type: ignore[arg-type]
@given(st.data(), spoiled(), st.sampled_from(("close", "close", "close", "reset")), st.sampled_from((PLAIN, STREAM)))
def test_no_answer_that_is_cut_looks_complete(
    shared: Rig, data: st.DataObject, sent: bytes, end: End, body: bytes
) -> None:
    splits = data.draw(st.lists(st.integers(1, len(sent)), max_size=4))
    answered(shared, sent, end, splits, body)
