"""The fleet benchmark: prompts share what the trace shares, the ideal is one cache, the load side keeps its schedule."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from bench.fleet import command, ideal, judge, load, report, trace
from bench.fleet.arms import COST, PEERS, ROUND_ROBIN, Arm, plan
from bench.fleet.judge import Ideal, Rate
from bench.fleet.toy import write_folder
from bench.fleet.trace import BLOCK, Ask
from kvgate.errors import UsageError
from loadtest.sim.text import WORDS
from loadtest.sim.tokens import Language

ROWS = [
    {"timestamp": 0, "input_length": 1500, "output_length": 100, "hash_ids": [0, 1, 2]},
    {"timestamp": 0, "input_length": 1024, "output_length": 3, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 2048, "output_length": 320, "hash_ids": [0, 1, 3, 4]},
]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_prompts_share_whole_blocks_exactly_where_the_trace_does(tmp_path: Path) -> None:
    asks = trace.read(written(tmp_path / "t", ROWS), 10)
    assert [(ask.blocks, ask.tokens, ask.output) for ask in asks] == [
        ((0, 1, 2), 47, 4),
        ((0, 1), 32, 1),
        ((0, 1, 3, 4), 64, 10),
    ]
    one, two, three = map(trace.numbers, asks)
    assert one[: 2 * BLOCK] == two == three[: 2 * BLOCK]
    assert one[2 * BLOCK :] != three[2 * BLOCK : len(one)]
    blocks = {tuple(trace.words(number)) for number in range(2000)}
    assert len(blocks) == 2000
    assert {ask.session for ask in asks} == {"session-1"}


def test_each_word_is_one_token(tmp_path: Path) -> None:
    language = Language.of_folder(write_folder(tmp_path))
    (ask,) = trace.read(written(tmp_path / "t", ROWS), 1)
    tokens = language.coder.encode(trace.text(ask), specials=True)
    assert len(tokens) == ask.tokens
    assert len(set(tokens)) == len(set(trace.numbers(ask)))
    every = "".join(f" {word}" for word in WORDS)
    assert len(language.coder.encode(every, specials=True)) == len(WORDS)


def test_times_are_spread_within_their_grid_and_keep_their_order() -> None:
    found = trace.spread([0.0, 0.0, 0.0, 3.0, 9.0], 3.0)
    assert found[0] == 0.0
    assert found == sorted(found)
    assert len(set(found)) == 5
    assert found == trace.spread([0.0, 0.0, 0.0, 3.0, 9.0], 3.0)
    shift = 3.0  # at most: what the first was put later
    assert all(at - shift <= when < at + 3.0 for at, when in zip([0.0, 0.0, 0.0, 3.0, 9.0], found, strict=True))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "no request"),
        ([ROWS[0], {"timestamp": 1}], "line 2"),
        ([ROWS[0] | {"input_length": 99_999}], "blocks are not of 512"),
    ],
)
def test_a_file_that_is_no_such_trace_is_refused(tmp_path: Path, rows: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        trace.read(written(tmp_path / "t", rows), 10)


def least_recently_used(asks: list[Ask], blocks: int) -> int:
    """Hits of a cache of block ids, in tokens: written apart from the simulator's."""
    held: dict[int, None] = {}
    hit = 0
    for ask in asks:
        run = 0
        while run < min(len(ask.blocks), (ask.tokens - 1) // BLOCK) and ask.blocks[run] in held:
            run += 1
        hit += run * BLOCK
        for block in reversed(ask.blocks[: ask.tokens // BLOCK]):
            held.pop(block, None)
            held[block] = None
        while len(held) > blocks:
            del held[next(iter(held))]
    return hit


def test_the_ideal_is_one_cache_of_so_many_blocks() -> None:
    chains = [tuple(100 * n + k for k in range(4)) for n in range(12)]
    asks = [Ask(float(n), chains[n * 5 % 12], 4 * BLOCK, 1) for n in range(60)]
    endless = ideal.delivered(asks, 1000)
    assert endless == 48 * 3 * BLOCK == least_recently_used(asks, 1000)
    assert ideal.delivered(asks, 24) == least_recently_used(asks, 24) == 0  # each comes back after eleven others
    again = [Ask(0.0, chains[0], 4 * BLOCK, 1), *asks]
    assert ideal.delivered(again, 30) == 3 * BLOCK


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
STREAM = (
    b'data: {"choices":[{"text":" the"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":32,"prompt_tokens_details":{"cached_tokens":16}}}\n\ndata: [DONE]\n\n'
)


async def replay(handler: Handler, count: int) -> list[load.Result]:
    served: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(cast("asyncio.Task[None]", asyncio.current_task()))
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await handler(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        plan = [{"due_s": 0.01 * n, "body": "{}", "session": "s"} for n in range(count)]
        results = await load.Load(port).run(plan)
        await asyncio.gather(*served)
    return results


async def request(reader: asyncio.StreamReader) -> None:
    await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(2)


async def test_the_load_side_reads_streams_in_any_pieces() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for at in range(0, len(STREAM), 7):
                piece = STREAM[at : at + 7]
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
            writer.write(b"0\r\n\r\n")

    results = await replay(serve, 5)
    assert [(one.status, one.prompt, one.cached) for one in results] == [(200, 32, 16)] * 5
    for one in results:
        assert one.sent is not None
        assert one.first is not None
        assert one.end is not None
        assert one.due <= one.sent <= one.first <= one.end


async def test_what_fails_is_counted_and_stops_nothing() -> None:
    seen = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        while True:
            await request(reader)
            seen += 1
            if seen == 1:
                return
            if seen == 2:
                writer.write(b"HTTP/1.1 503 Full\r\ncontent-length: 0\r\n\r\n")
            elif seen == 3:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\ndata: 1\n")  # no end of the stream
            else:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(STREAM), STREAM))

    rows = [one.row() for one in await replay(serve, 4)]
    assert [(row["status"], row["end_s"] is None) for row in rows] == [
        (0, True),
        (503, True),
        (200, True),
        (200, False),
    ]


def arm(policy: str, ttft: float, *, cached: int = 90, late: float = 0.0, lag: float = 0.001) -> Arm:
    answer = {"status": 200, "lag_s": lag, "ttft_s": ttft, "end_s": ttft + 1, "prompt": 100, "cached": cached}
    did = {"prompt": 100.0, "cached": float(cached), "requests": 1.0, "preemptions": 0.0, "late_s": late}
    return Arm(policy, 10.0, [dict(answer) for _ in range(4)], [dict(did) for _ in range(2)], [])


def judged(ours: Arm, *others: Arm) -> list[judge.Bar]:
    rate = Rate(0.4, 2.0, 10.0, {one.policy: one for one in (ours, *others)})
    return judge.bars([rate], Ideal(400, 370, 380), 100.0, [100] * 4)


def test_bars_hold_or_fail_by_what_was_measured() -> None:
    names = (ROUND_ROBIN, *PEERS)
    good = judged(arm(COST, 0.1), *(arm(name, 0.2) for name in names))
    assert [bar.verdict for bar in good] == ["pass"] * 5
    assert judge.verdict(good) == "pass"
    slow = judged(arm(COST, 0.3), *(arm(name, 0.2) for name in names))
    assert [bar.verdict for bar in slow] == ["pass", "pass", "fail", "fail", "fail"]
    cold = judged(arm(COST, 0.1, cached=80))
    assert [bar.verdict for bar in cold] == ["fail", "pass"]
    assert judge.verdict(cold) == "fail"


@pytest.mark.parametrize("bad", [{"late": 5.0}, {"lag": 0.5}])
def test_what_the_machine_was_too_slow_for_is_invalid(bad: dict[str, Any]) -> None:
    found = judged(arm(COST, 0.1), arm(ROUND_ROBIN, 0.2, **bad), arm(PEERS[0], 0.2))
    assert [bar.verdict for bar in found] == ["pass", "pass", "INVALID", "pass"]
    assert judge.verdict(found) == "INVALID"


def test_another_number_of_tokens_is_invalid() -> None:
    one = arm(COST, 0.1)
    one.answers[2]["prompt"] = 99
    assert judge.faults(one, [100] * 4) == ["1 prompts have another number of tokens than planned"]
    one.answers[3]["cached"] = None
    assert len(judge.faults(one, [100] * 4)) == 2


def test_failed_requests_stay_in_the_share_of_those_that_succeeded() -> None:
    one = arm(COST, 0.1)
    one.answers[0] |= {"status": 0, "ttft_s": None, "end_s": None, "prompt": None, "cached": None}
    assert one.succeeded == 0.75
    assert judge.figures(one, Ideal(400, 370, 380), 100.0)["succeeded"] == 0.75


def test_the_page_says_what_the_document_says() -> None:
    asks = [Ask(float(n), (0, n), 20, 1) for n in range(4)]
    rate = Rate(
        0.4, 2.0, 10.0, {COST: arm(COST, 0.1), ROUND_ROBIN: arm(ROUND_ROBIN, 0.2, late=9.0)}, {PEERS[0]: "no\nway"}
    )
    best = Ideal(400, 370, 380)
    found = judge.bars([rate], best, 100.0, [100] * 4)
    where = {"commit": "abc", "dirty": False, "date": "d", "cpu": "c", "cores": 2, "kernel": "k"}
    where |= {"load_average_at_start": 0.1, "realtime": False, "versions": {"python": "3"}}
    args = command.parser().parse_args(["--trace", __file__])
    given = command._given(args, asks, command.fleet(6.0))
    document = report.document([rate], best, found, given, where, [100] * 4)
    assert document["verdict"] == "INVALID"
    page = report.markdown(document)
    assert "| kvgate/cost | 0.973 | 90.0% | 100 | 100 | 100 |" in page
    assert f"**{PEERS[0]}** did not start: no way" in page
    assert "behind their time" in page
    assert json.loads(json.dumps(document)) == document


def test_the_plan_asks_for_what_the_trace_asks_for() -> None:
    line = json.loads(plan([Ask(3.0, (0, 7), 20, 5)], 1.5))
    assert (line["due_s"], line["session"]) == (2.0, "session-7")
    body = json.loads(line["body"])
    assert (body["max_tokens"], body["ignore_eos"], len(body["prompt"].split())) == (5, True, 20)


def test_capacity_over_working_set_is_that_of_the_engine() -> None:
    engines = command.fleet(6.0)
    assert engines.blocks * 512 <= 855_000 <= (engines.blocks + 10) * 512
    assert engines.prefill == pytest.approx(6.0 * 33_860 / 32, rel=0.01)
