"""Any bytes from a client: what reaches an engine is what a strict parser reads in them, and the answers are HTTP.

The property of every example is `judge`, in fuzzing.py; the strict parser is strict_http.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.exchange import protocol
from tests.fakes import wire
from tests.fakes.engine import FakeEngine
from tests.fakes.raw_client import RawClient, get, post
from tests.server.fuzzing import CHAT, MAX_BODY_BYTES, PLAIN, Rig, echo, judge, rig, until, wanted
from tests.server.running import running_gateway

QUICK = {"deadline": None, "derandomize": True, "database": None}
TOP = b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\n"
EVIL = post(CHAT, b'{"model":"tiny","messages":["smuggled"]}')
OTHER = b'{"messages":[],"model":"tiny"}'
UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"


@pytest.fixture(scope="module")
def shared() -> Iterator[Rig]:
    with rig() as made:
        made.engine.always(echo)
        yield made


def with_length(*lines: bytes, body: bytes = PLAIN, top: bytes = TOP) -> bytes:
    """A POST with Content-Length behind these header lines."""
    return top + b"".join(line + b"\r\n" for line in lines) + b"content-length: %d\r\n\r\n" % len(body) + body


def with_head(*lines: bytes, rest: bytes, top: bytes = TOP) -> bytes:
    """A POST with these header lines and no framing but theirs."""
    return top + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + rest


def in_chunks(*chunks: bytes, lines: bytes = b"transfer-encoding: chunked\r\n", end: bytes = b"0\r\n\r\n") -> bytes:
    """A POST whose chunks come as they are given, sizes and all."""
    return TOP + lines + b"\r\n" + b"".join(chunks) + end


CHUNKED = in_chunks(wire.chunk(PLAIN[:7]), wire.chunk(PLAIN[7:]))

REFUSED = {
    "CL and TE": with_length(b"transfer-encoding: chunked", body=b"0\r\n\r\n" + EVIL),
    "TE and CL": with_head(
        b"transfer-encoding: chunked", b"content-length: 4", rest=b"5c\r\n" + EVIL + b"\r\n0\r\n\r\n"
    ),
    "two lengths": with_head(b"content-length: 0", b"content-length: %d" % len(EVIL), rest=EVIL),
    "the same length twice": with_head(*[b"content-length: %d" % len(PLAIN)] * 2, rest=PLAIN),
    "a list of lengths": with_head(b"content-length: %d, %d" % (len(PLAIN), len(PLAIN)), rest=PLAIN),
    "length with a sign": with_head(b"content-length: +%d" % len(PLAIN), rest=PLAIN),
    "negative length": with_head(b"content-length: -1", rest=EVIL),
    "hexadecimal length": with_head(b"content-length: 0x10", rest=EVIL),
    "empty length": with_head(b"content-length:", rest=EVIL),
    "length past 64 bits": with_head(b"content-length: 18446744073709551617", rest=b"{" + EVIL),
    "blank in the length": with_head(b"content-length: 1 0", rest=EVIL),
    "TE with a blank before the colon": with_head(b"transfer-encoding : chunked", rest=b"0\r\n\r\n" + EVIL),
    "TE with a tab before the colon": with_head(b"transfer-encoding\t: chunked", rest=b"0\r\n\r\n" + EVIL),
    "TE with a vertical tab": with_head(b"transfer-encoding: \x0bchunked", rest=b"0\r\n\r\n" + EVIL),
    "TE with NUL": with_head(b"transfer-encoding: chunked\x00", rest=b"0\r\n\r\n" + EVIL),
    "TE folded": with_head(b"transfer-encoding:\r\n chunked", rest=b"0\r\n\r\n" + EVIL),
    "TE in a folded line": with_head(b"x: a\r\n transfer-encoding: chunked", rest=b"0\r\n\r\n" + EVIL),
    "TE behind a bare LF": with_head(b"x: a\ntransfer-encoding: chunked", rest=b"0\r\n\r\n" + EVIL),
    "TE behind a bare CR": with_head(b"x: a\rtransfer-encoding: chunked", rest=b"0\r\n\r\n" + EVIL),
    "TE identity": with_head(b"transfer-encoding: identity", rest=EVIL),
    "TE unknown": with_head(b"transfer-encoding: xchunked", rest=b"0\r\n\r\n" + EVIL),
    "TE gzip, chunked": in_chunks(wire.chunk(PLAIN), lines=b"transfer-encoding: gzip, chunked\r\n"),
    "TE chunked, identity": in_chunks(wire.chunk(PLAIN), lines=b"transfer-encoding: chunked, identity\r\n"),
    "TE twice": in_chunks(wire.chunk(PLAIN), lines=b"transfer-encoding: chunked\r\n" * 2),
    "TE quoted": in_chunks(wire.chunk(PLAIN), lines=b'transfer-encoding: "chunked"\r\n'),
    "TE empty": with_head(b"transfer-encoding:", rest=b"0\r\n\r\n" + EVIL),
    "TE in HTTP/1.0": CHUNKED.replace(b"1.1", b"1.0", 1),
    "TE identity on a route of the gateway's own": get("/health/live")[:-2] + b"transfer-encoding: identity\r\n\r\nabc",
    "bare LF throughout": TOP.replace(b"\r\n", b"\n") + b"content-length: 0\n\n\r\n\r\n",
    "bare LF ends the head": with_head(b"x: a\r\n", rest=b"").replace(b"\r\n\r\n", b"\r\n\n") + b"\r\n\r\n",
    "no colon": with_length(b"nonsense"),
    "no name": with_length(b": x"),
    "blank in a name": with_length(b"x y: z"),
    "NUL in a name": with_length(b"x\x00: z"),
    "NUL in a value": with_length(b"x: a\x00b"),
    "control byte in a value": with_length(b"x: a\x01b"),
    "DEL in a value": with_length(b"x: a\x7fb"),
    "first header line folded": TOP[:-11] + b" folded\r\n" + TOP[-11:] + b"\r\n",
    "no host": with_length().replace(b"host: t\r\n", b""),
    "two hosts": with_length(b"host: u"),
    "HTTP/0.9 said": with_length(top=TOP.replace(b"1.1", b"0.9")),
    "HTTP/0.9 meant": with_length(top=TOP.replace(b" HTTP/1.1", b"")),
    "HTTP/2.0": with_length(top=TOP.replace(b"1.1", b"2.0")),
    "HTTP/2.0 and an upgrade": with_length(UPGRADE[:-2], top=TOP.replace(b"1.1", b"2.0")),
    "HTTP/1.2": with_length(top=TOP.replace(b"1.1", b"1.2")),
    "lower-case protocol": with_length(top=TOP.replace(b"HTTP", b"http")),
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    "NUL in the target": with_length(top=TOP.replace(b"chat", b"ch\x00at")),
    "chunk size with a sign": in_chunks(b"+%x\r\n%b\r\n" % (len(PLAIN), PLAIN)),
    "chunk size with 0x": in_chunks(b"0x%x\r\n%b\r\n" % (len(PLAIN), PLAIN)),
    "chunk size with a blank before it": in_chunks(b" %x\r\n%b\r\n" % (len(PLAIN), PLAIN)),
    "chunk size with a blank behind it": in_chunks(b"%x \r\n%b\r\n" % (len(PLAIN), PLAIN)),
    "chunk size past 64 bits": in_chunks(b"10000000000000000%x\r\n%b\r\n" % (len(PLAIN), PLAIN)),
    "no chunk size": in_chunks(b"\r\n" + PLAIN + b"\r\n"),
    "chunk size behind a bare LF": in_chunks(b"%x\n%b\r\n" % (len(PLAIN), PLAIN)),
    "chunk longer than it says": in_chunks(b"%x\r\n%b\r\n" % (len(PLAIN) - 1, PLAIN)),
    "chunk end a bare LF": in_chunks(b"%x\r\n%b\n" % (len(PLAIN), PLAIN)),
    "bare LF in a chunk extension": in_chunks(b"%x;a\nb\r\n%b\r\n" % (len(PLAIN), PLAIN)),
    "empty chunk extension": in_chunks(b"%x;\r\n%b\r\n" % (len(PLAIN), PLAIN)),
    "control byte in a chunk extension": in_chunks(b'%x;a="\x01"\r\n%b\r\n' % (len(PLAIN), PLAIN)),
    "folded trailer": in_chunks(wire.chunk(PLAIN), end=b"0\r\nx: a\r\n b\r\n\r\n"),
    "blank in a trailer's name": in_chunks(wire.chunk(PLAIN), end=b"0\r\nx : a\r\n\r\n"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_request_is_refused_and_nothing_in_it_is_smuggled(shared: Rig, name: str) -> None:
    data = REFUSED[name] + EVIL
    for pieces in ((data,), tuple(data[at : at + 1] for at in range(len(data)))):
        outcome = shared.send(*pieces)
        reading = judge(data, outcome)
        assert reading.end == "malformed"
        assert reading.requests == []
        assert outcome.forwarded == []
        assert [answer.status for answer in outcome.answers] == [400]


@pytest.mark.parametrize("name", list(REFUSED)[::7])
def test_what_is_refused_behind_a_good_request_does_not_spoil_that_one(shared: Rig, name: str) -> None:
    data = post(CHAT, OTHER) + REFUSED[name] + EVIL
    for pieces in ((data,), (post(CHAT, OTHER), REFUSED[name] + EVIL)):
        outcome = shared.send(*pieces)
        judge(data, outcome)
        assert [r.body for r in outcome.forwarded] == [OTHER]
        assert outcome.answers[0].status == 200


TAKEN = {
    "blank lines before it": b"\r\n\r\n" + with_length(),
    "no blank behind the colons": with_length(b"x:y", top=TOP.replace(b": ", b":")),
    "bytes above ASCII in a value": with_length(b"x: \xc3\xa9\xff"),
    "a long number for a length": with_head(b"content-length: %020d" % len(PLAIN), rest=PLAIN),
    "capital letters": with_length(top=TOP.replace(b"host", b"HOST")),
    "chunks": CHUNKED,
    "CHUNKED": in_chunks(wire.chunk(PLAIN), lines=b"TRANSFER-ENCODING: CHUNKED \r\n"),
    "chunk extensions": in_chunks(b'%x;a;b=c;d="e;\\"f"\r\n%b\r\n' % (len(PLAIN), PLAIN)),
    "leading zeros in a chunk size": in_chunks(b"0000%X\r\n%b\r\n" % (len(PLAIN), PLAIN)),
    "trailers": in_chunks(wire.chunk(PLAIN), end=b"0\r\nx-length: 5\r\nhost: evil\r\n\r\n"),
    "absolute form": with_length(top=TOP.replace(b"/v1", b"http://other:80/v1")),
    "a query": with_length(top=TOP.replace(b"completions", b"completions?a=b%20c")),
    "escapes in the path": with_length(top=TOP.replace(b"/chat/", b"/ch%61t%2F")),
    "an offer of HTTP/2": with_length(UPGRADE[:-2]),
    "an offer of a WebSocket, in chunks": in_chunks(
        wire.chunk(PLAIN), lines=b"connection: upgrade\r\nupgrade: websocket\r\ntransfer-encoding: chunked\r\n"
    ),
    "Expect: 100-continue": with_length(b"expect: 100-continue"),
    "Expect: 100-continue, in chunks": in_chunks(
        wire.chunk(PLAIN), lines=b"expect: 100-Continue\r\ntransfer-encoding: chunked\r\n"
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_unusual_and_right_is_taken_wherever_it_is_split(shared: Rig, name: str) -> None:
    data = TAKEN[name]
    places = (
        range(1, len(data)) if name in ("chunks", "an offer of HTTP/2", "Expect: 100-continue") else [len(data) // 2]
    )
    splits = [(data,), tuple(data[at : at + 1] for at in range(len(data))), *((data[:at], data[at:]) for at in places)]
    for pieces in splits:
        outcome = shared.send(*pieces, post(CHAT, OTHER))
        reading = judge(data + post(CHAT, OTHER), outcome)
        assert reading.end == "border"
        assert [r.body for r in outcome.forwarded] == [PLAIN, OTHER]
        assert [answer.status for answer in outcome.answers] == [200, 200]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("data", "statuses", "forwarded"),
    [
        pytest.param(get("*").replace(b"GET", b"OPTIONS") + with_length(), [404, 200], [PLAIN], id="asterisk"),
        pytest.param(get("http://t") + with_length(), [404, 200], [PLAIN], id="absolute form without a path"),
        pytest.param(get("http://t?q") + with_length(), [404, 200], [PLAIN], id="absolute form with a query alone"),
        pytest.param(get("http://t:99999999/x"), [400], [], id="a port that is none"),
        pytest.param(get("/health/live").replace(b"GET", b"HEAD"), [405], [], id="HEAD"),
        pytest.param(b"CONNECT t:443 HTTP/1.1\r\nhost: t\r\n\r\n" + EVIL, [405], [], id="CONNECT"),
        pytest.param(b"CONNECT /v1 HTTP/1.1\r\nhost: t\r\n\r\n" + EVIL, [405], [], id="CONNECT to a path"),
        pytest.param(with_length(b"connection: close") + EVIL, [200], [PLAIN], id="behind Connection: close"),
        pytest.param(
            with_length(b"connection: close", body=b"{") + EVIL, [400], [], id="behind a wrong one with close"
        ),
        pytest.param(get("/nope", [("connection", "close")]) + EVIL, [404], [], id="behind an own route with close"),
        pytest.param(with_length(top=TOP.replace(b"1.1", b"1.0")) + EVIL, [200], [PLAIN], id="behind HTTP/1.0"),
        pytest.param(
            with_length(b"connection: keep-alive, upgrade", b"upgrade: h2c", top=TOP.replace(b"1.1", b"1.0")) + EVIL,
            [200],
            [PLAIN],
            id="behind HTTP/1.0 that offers an upgrade",
        ),
        pytest.param(with_length(body=b"x" * (MAX_BODY_BYTES + 1)) + EVIL, [413], [], id="behind a body too large"),
        pytest.param(in_chunks(wire.chunk(b"x" * (MAX_BODY_BYTES + 1))) + EVIL, [413], [], id="and in chunks"),
        pytest.param(
            with_length() + with_length(body=b"x" * (MAX_BODY_BYTES + 1)) + EVIL,
            [200, 413],
            [PLAIN],
            id="and pipelined",
        ),
        pytest.param(with_head(b"content-length: " + b"0" * 5000, rest=EVIL), [400], [], id="5000 digits of length"),
        pytest.param(with_length(body=EVIL) + with_length(), [400, 200], [PLAIN], id="a request as a body"),
        pytest.param(with_length(top=TOP.replace(b"POST", b"post")), [400], [], id="lower-case method"),
        pytest.param(with_length(top=TOP.replace(b"POST", b"POSTAL")), [400], [], id="unknown method"),
        pytest.param(with_length() * 3, [200] * 3, [PLAIN] * 3, id="pipelined"),
        pytest.param(
            get("/health/live") + with_length(UPGRADE[:-2]) * 3, [200] * 4, [PLAIN] * 3, id="offers pipelined"
        ),
        pytest.param(with_length() + get("/health/live") + CHUNKED, [200] * 3, [PLAIN] * 2, id="own routes between"),
        pytest.param(with_length()[:-1], [], [], id="a body that lacks a byte"),
        pytest.param(CHUNKED[:-2], [], [], id="chunks that lack their end"),
        pytest.param(with_length() + EVIL[:-1], [200], [PLAIN], id="half a request behind a whole one"),
    ],
)
def test_borders(shared: Rig, data: bytes, statuses: list[int], forwarded: list[bytes], split: bool) -> None:
    outcome = shared.send(*(data[at : at + 50] for at in range(0, len(data), 50)) if split else (data,))
    judge(data, outcome)
    assert [answer.status for answer in outcome.answers] == statuses
    assert [r.body for r in outcome.forwarded] == forwarded


def test_expect_is_answered_before_the_body_comes_and_not_when_it_is_refused(shared: Rig) -> None:
    good, large = with_length(b"expect: 100-continue"), with_length(b"expect: 100-continue", body=b"x" * 6000)
    outcome = shared.send(good[: -len(PLAIN)], PLAIN)
    assert [(a.status, a.interim) for a in outcome.answers] == [(200, [100])]
    outcome = shared.send(large[:-6000])
    assert [(a.status, a.interim) for a in outcome.answers] == [(413, [])]


@pytest.mark.parametrize("rest", [b"zz\r\n", b"5\r\nabcdeX\r\n"])
def test_a_request_that_was_answered_before_its_body_went_wrong_has_one_answer(shared: Rig, rest: bytes) -> None:
    head = get("/health/live", [("transfer-encoding", "chunked")])
    outcome = shared.send(head, rest, in_turn=True)
    judge(head + rest, outcome)
    assert [answer.status for answer in outcome.answers] == [200]
    assert outcome.closed


@pytest.mark.parametrize(
    "sent",
    [with_length(body=b"x" * 6000)[:3000], with_length(b"expect: 100-continue", body=b"x" * 6000)[:-6000], b"?\r\n"],
)
async def test_a_refused_client_that_stays_has_one_answer(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 0.05)
    quick = {"max_body_bytes": MAX_BODY_BYTES, "header_timeout": 0.2, "body_timeout": 0.2}
    async with running_gateway(engine.url, **quick) as gateway, await RawClient.connect(gateway.port) as client:
        await client.send(sent)
        assert (await client.read_response()).status in (400, 413)
        await until(lambda: not gateway.gateway.connections)
        assert await client.read_to_end() == b""
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


# -- requests by a grammar, all of them right

TARGETS = (
    CHAT,
    CHAT,
    "/v1/completions",
    CHAT + "?q",
    "http://t" + CHAT,
    "/v1/ch%61t/completions",
    "/health/live",
    "/no",
)
BODIES = (PLAIN, OTHER, b'{"model":"tiny","prompt":"a\\r\\n\\r\\n"}', EVIL, b"", b"0\r\n\r\n", b"x" * 3000)
FIELDS = (
    b"x-a: 1",
    b"X-B:\t2 ",
    b"x-c:",
    b"accept: */*",
    b"te: trailers",
    b"x-long: " + b"l" * 500,
    b"connection: keep-alive",
    b"connection: x-a",
    b"expect: 100-continue",
    UPGRADE[:-2],
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """One request of HTTP/1.1."""
    method = draw(st.sampled_from(("POST", "POST", "POST", "GET", "PUT")))
    top = f"{method} {draw(st.sampled_from(TARGETS))} HTTP/1.1\r\nhost: t\r\n".encode()
    fields = draw(st.lists(st.sampled_from(FIELDS), max_size=3, unique=True))
    body = draw(st.sampled_from(BODIES))
    if draw(st.booleans()):
        return with_length(*fields, body=body, top=top)
    size = draw(st.integers(1, 80)) if len(body) < 500 else 1000
    chunks = b"".join(wire.chunk(body[at : at + size]) for at in range(0, len(body), size))
    end = draw(st.sampled_from((b"0\r\n\r\n", b"00;last\r\n\r\n", b"0\r\nx-sum: 1\r\n\r\n")))
    return with_head(*fields, b"transfer-encoding: chunked", rest=chunks + end, top=top)


@st.composite
def split(draw: st.DrawFn, data: bytes) -> tuple[bytes, ...]:
    """These bytes in pieces."""
    if not data or draw(st.integers(0, 3)) == 0:
        return (data,)
    return tuple(wire.pieces(data, draw(st.lists(st.integers(0, len(data)), min_size=1, max_size=5))))


@settings(max_examples=200, **QUICK)  # type: ignore[arg-type]
@given(st.data())
def test_every_right_request_is_answered_and_forwarded_as_it_is(shared: Rig, data: st.DataObject) -> None:
    sent = b"".join(data.draw(st.lists(requests(), min_size=1, max_size=4)))
    outcome = shared.send(*data.draw(split(sent)))
    reading = judge(sent, outcome)
    assert reading.end == "border"
    assert not outcome.closed
    assert len(outcome.answers) == len(reading.requests)
    assert [r.body for r in outcome.forwarded] == [w[1] for r in reading.requests if (w := wanted(r)) is not None]


# -- and the same with something wrong

LINES = (
    *(b"transfer-encoding: chunked", b"Transfer-Encoding : chunked", b"transfer-encoding:\tchunked", b"te: chunked"),
    *(b"transfer-encoding: chunked, identity", b"transfer-encoding: xchunked", b" transfer-encoding: chunked"),
    *(b"content-length: 0", b"content-length: 3, 3", b"content-length: +3", b"content-length: 99999999999999999999"),
    *(
        b"content-length:",
        b"Content-Length : 4",
        b"x: a\r\n b",
        b"x\x00: 1",
        b"x: \x00",
        b"x: \n",
        b"x: \r",
        b"host: u",
    ),
    *(b"connection: close", b"connection: close, upgrade", b"upgrade: websocket", b"connection: content-length"),
    *(b"connection: transfer-encoding", b"expect: nothing", b"expect: 100-continue", b"x-request-id: a\tb"),
)
PIECES = (
    *(
        b"\r",
        b"\n",
        b"\r\n",
        b"\r\n\r\n",
        b"\n\n",
        b"\x00",
        b" ",
        b"\t",
        b"\x7f",
        b"\xff",
        b":",
        b";",
        b",",
        b'"',
        b"#",
    ),
    *(b"0\r\n\r\n", b"\r\n0\r\n\r\n", b"5;x\r\n", b"ffffffffffffffffff\r\n", b"-1", b"0x", b"HTTP/1.0", b"HTTP/2.0"),
    *(b"\r\ntransfer-encoding: chunked", b"\r\ncontent-length: 1", b"GET / HTTP/1.1\r\n", EVIL),
)


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    """Pipelined requests with one to three faults put in, and a request behind them that such faults may let through."""
    parts = draw(st.lists(requests(), min_size=1, max_size=3))
    for _ in range(draw(st.integers(1, 3))):
        number = draw(st.integers(0, len(parts) - 1))
        data = parts[number]
        kind = draw(st.integers(0, 4))
        if kind <= 1:
            lines = data.split(b"\r\n")
            top = max(1, lines.index(b"") if b"" in lines else 1)
            lines.insert(draw(st.integers(1, top)), draw(st.sampled_from(LINES)))
            parts[number] = b"\r\n".join(lines)
            continue
        at = draw(st.integers(0, min(len(data), 300)))
        if kind == 2:
            parts[number] = data[:at] + draw(st.sampled_from(PIECES)) + data[at:]
        elif kind == 3:
            parts[number] = data[:at] + data[at + draw(st.integers(1, 4)) :]
        else:
            parts[number] = data[:at] + draw(st.binary(min_size=1, max_size=3)) + data[at + 1 :]
    return b"".join(parts) + EVIL


@settings(max_examples=350, **QUICK)  # type: ignore[arg-type]
@given(st.data())
def test_no_fault_in_a_request_moves_a_border(shared: Rig, data: st.DataObject) -> None:
    sent = data.draw(spoiled())
    judge(sent, shared.send(*data.draw(split(sent))))


@settings(max_examples=100, **QUICK)  # type: ignore[arg-type]
@given(st.binary(max_size=200), st.sampled_from((b"", TOP, TOP + b"transfer-encoding: chunked\r\n\r\n")))
def test_noise(shared: Rig, noise: bytes, top: bytes) -> None:
    judge(top + noise, shared.send(top + noise))
