"""--kv-events, and what engines say of their own events."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import orjson
import pytest

from kvgate.errors import UsageError
from server.ledger.sources import Endpoint, EventSources, Ranks, Unreachable, told_by_engine
from server.replica import EngineUrl

LOCAL = EngineUrl.parse("http://127.0.0.1:8001")
FAR = EngineUrl.parse("http://engine-0.engines:8001")
SIX = EngineUrl.parse("http://[fd00::1]:8001")


@pytest.mark.parametrize(
    ("text", "url", "ranks"),
    [
        ("off", FAR, {}),
        ("auto", FAR, None),
        ("tcp://{host}:5557", FAR, {0: Endpoint("tcp://engine-0.engines:5557")}),
        ("tcp://{host}:5557+tcp://{host}:5657", SIX, {0: Endpoint("tcp://[fd00::1]:5557", "tcp://[fd00::1]:5657")}),
        (
            "tcp://{host}:1+tcp://{host}:11, tcp://{host}:2+tcp://{host}:12",
            LOCAL,
            {
                0: Endpoint("tcp://127.0.0.1:1", "tcp://127.0.0.1:11"),
                1: Endpoint("tcp://127.0.0.1:2", "tcp://127.0.0.1:12"),
            },
        ),
        (
            "127.0.0.1:8001=ipc:///run/a+b.sock+ipc:///run/r.sock",
            LOCAL,
            {0: Endpoint("ipc:///run/a+b.sock", "ipc:///run/r.sock")},
        ),
        ("127.0.0.1:8001=ipc:///run/a.sock", FAR, {}),
        ("127.0.0.1:8001=ipc:///run/a.sock,auto", FAR, None),
        ("[fd00::1]:8001=tcp://[fd00::2]:7,tcp://{host}:5557", SIX, {0: Endpoint("tcp://[fd00::2]:7")}),
        ("[fd00::1]:8001=tcp://[fd00::2]:7,tcp://{host}:5557", LOCAL, {0: Endpoint("tcp://127.0.0.1:5557")}),
    ],
)
def test_what_the_setting_says_of_a_replica(text: str, url: EngineUrl, ranks: Ranks | None) -> None:
    assert EventSources.parse(text).of(url) == ranks


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is no endpoint"),
        ("on", "is no endpoint"),
        ("tcp://*:5557", "the gateway connects"),
        ("tcp://host", "is no endpoint"),
        ("tcp://host:0", "is no endpoint"),
        ("tcp://host:70000", "is no endpoint"),
        ("tcp://host:1/path", "is no endpoint"),
        ("udp://host:1", "is no endpoint"),
        ("ipc://relative", "is no endpoint"),
        ("ipc:///" + "x" * 110, "is no endpoint"),
        ("tcp://a:1+tcp://a:2+tcp://a:3", "more than two addresses"),
        ("host=tcp://a:1", "'host' is not the host:port of an engine"),
        ("http://host:1=tcp://a:1", "is no endpoint"),
        ("auto,tcp://{host}:1", "exclude each other"),
        ("127.0.0.1:8001=", "is no endpoint"),
    ],
)
def test_a_wrong_setting_names_the_fault(text: str, says: str) -> None:
    with pytest.raises(UsageError, match="--kv-events") as error:
        EventSources.parse(text)
    assert says in str(error.value)


def said(**fields: Any) -> dict[str, Any]:
    """One rank's configuration as vLLM 0.32 answers it."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": None}
    return config | {"buffer_steps": 10000, "hwm": 100000, "max_queue_size": 100000, "topic": ""} | fields


@pytest.mark.parametrize(
    ("answer", "url", "ranks"),
    [
        ({}, FAR, {}),
        ([], FAR, {}),
        ({"0": said()}, FAR, {0: Endpoint("tcp://engine-0.engines:5557")}),
        (
            {"0": said(replay_endpoint="tcp://*:5657")},
            SIX,
            {0: Endpoint("tcp://[fd00::1]:5557", "tcp://[fd00::1]:5657")},
        ),
        ({"3": said(endpoint="tcp://0.0.0.0:1")}, LOCAL, {3: Endpoint("tcp://127.0.0.1:1")}),
        ({"0": said(endpoint="tcp://[::]:1")}, LOCAL, {0: Endpoint("tcp://127.0.0.1:1")}),
        ({"0": said(endpoint="tcp://10.0.0.7:40123")}, FAR, {0: Endpoint("tcp://10.0.0.7:40123")}),
        ({"0": said(enable_kv_cache_events=False)}, FAR, {}),
        (
            {"1": said(endpoint="tcp://*:2"), "0": said(endpoint="tcp://*:1")},
            LOCAL,
            {0: Endpoint("tcp://127.0.0.1:1"), 1: Endpoint("tcp://127.0.0.1:2")},
        ),
        (
            [{"data_parallel_rank": 1, "endpoint": "tcp://10.0.0.1:5557", "replay_endpoint": None, "topic": ""}],
            FAR,
            {1: Endpoint("tcp://10.0.0.1:5557")},
        ),
    ],
)
def test_what_an_engine_says_of_itself(answer: Any, url: EngineUrl, ranks: Ranks) -> None:
    assert told_by_engine(orjson.dumps(answer), url) == ranks


def test_a_socket_counts_only_on_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    answer = orjson.dumps({"0": said(endpoint=f"ipc://{path}")})
    with pytest.raises(Unreachable, match="not on this machine"):
        told_by_engine(answer, LOCAL)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        assert told_by_engine(answer, LOCAL) == {0: Endpoint(f"ipc://{path}")}
        with pytest.raises(Unreachable, match="not on this machine"):
            told_by_engine(answer, FAR)


@pytest.mark.parametrize("endpoint", ["inproc://x", "tcp://", "file:///etc/passwd"])
def test_other_transports_cannot_be_reached(endpoint: str) -> None:
    with pytest.raises(Unreachable, match="cannot be connected to"):
        told_by_engine(orjson.dumps({"0": said(endpoint=endpoint)}), LOCAL)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"null",
        b"7",
        b'{"x": {}}',
        b'{"0": {"endpoint": 7}}',
        b'[{"data_parallel_rank": "x"}]',
        b'[{"data_parallel_rank": [1]}]',
    ],
)
def test_anything_else_is_no_answer(answer: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        told_by_engine(answer, LOCAL)
