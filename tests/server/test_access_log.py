"""The access log: what a line holds, and that neither disk nor pipe nor rotation loses one silently or stops the gateway."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgate.errors import UsageError
from server.access_log import AccessLog
from server.log_file import LogFile
from server.record import RequestRecord

RECORD = RequestRecord(
    ended=1_800_000_000.0429,
    request_id=b"req-1",
    route="/v1/chat/completions",
    model="qwen3",
    tenant="acme",
    status=200,
)


def settle(log: AccessLog) -> None:
    """Flushes, and waits until it is written."""
    log.flush()
    assert log._file is not None
    deadline = time.monotonic() + 5
    while log._file.busy:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "access.log"


@pytest.fixture
def log(path: Path) -> Iterator[AccessLog]:
    log = AccessLog(str(path))
    yield log
    log.close()


def test_a_line_has_every_field_and_what_is_unknown_is_null(log: AccessLog, path: Path) -> None:
    log.write(RECORD)
    settle(log)
    assert lines(path) == [
        {
            "time": "2027-01-15T08:00:00.042Z",
            "request_id": "req-1",
            "route": "/v1/chat/completions",
            "model": "qwen3",
            "tenant": "acme",
            "key_id": None,
            "replica": None,
            "status": 200,
            "stream": False,
            "prompt_tokens": None,
            "cached_tokens": None,
            "output_tokens": None,
            "ttft_ms": None,
            "duration_ms": None,
            "queue_ms": None,
            "overhead_us": None,
            "retries": 0,
            "request_bytes": 0,
            "answer_bytes": 0,
            "reason": None,
            "trace_id": None,
        }
    ]


def test_units_and_a_known_zero(log: AccessLog, path: Path) -> None:
    log.write(RECORD._replace(ttft=0.0123456, duration=61.5, queue=0.0, overhead=0.000_123_4, cached_tokens=0))
    settle(log)
    (line,) = lines(path)
    assert (line["ttft_ms"], line["duration_ms"], line["queue_ms"]) == (12.345, 61500.0, 0.0)
    assert line["overhead_us"] == 123
    assert line["cached_tokens"] == 0


def test_only_its_owner_and_group_may_read_the_file(log: AccessLog, path: Path) -> None:
    assert path.stat().st_mode & 0o007 == 0


def test_times_go_on_over_the_border_of_a_second(log: AccessLog, path: Path) -> None:
    for ended in (1.9999, 2.0, 1.5):
        log.write(RECORD._replace(ended=ended))
    settle(log)
    assert [line["time"] for line in lines(path)] == [
        "1970-01-01T00:00:01.999Z",
        "1970-01-01T00:00:02.000Z",
        "1970-01-01T00:00:01.500Z",
    ]


@settings(max_examples=50)
@given(st.text(), st.text(), st.binary(max_size=128), st.integers(0, 2**63))
def test_whatever_the_names_are_it_is_one_line_of_json(model: str, tenant: str, request_id: bytes, tokens: int) -> None:
    read, write = os.pipe()
    try:
        log = AccessLog(f"/dev/fd/{write}")
        log.write(RECORD._replace(model=model, tenant=tenant, request_id=request_id, prompt_tokens=tokens))
        log.close()
        text = os.read(read, 65536)
    finally:
        os.close(read)
        os.close(write)
    assert text.count(b"\n") == 1
    line = json.loads(text)
    assert (line["model"], line["tenant"], line["prompt_tokens"]) == (model, tenant, tokens)


def test_a_name_that_is_no_unicode_is_counted_not_raised(log: AccessLog, path: Path) -> None:
    log.write(RECORD._replace(model="\ud800"))
    log.write(RECORD)
    settle(log)
    assert log.lost == 1
    assert [line.get("lost") for line in lines(path)] == [None, 1]


def test_off_does_nothing() -> None:
    log = AccessLog("off")
    assert not log.enabled
    log.write(RECORD)
    log.flush()
    log.reopen()
    log.close()
    assert log.lost == 0


def test_closing_writes_what_is_left(path: Path) -> None:
    log = AccessLog(str(path))
    log.write(RECORD)
    log.close()
    assert len(lines(path)) == 1


def test_it_appends(path: Path) -> None:
    for _ in range(2):
        log = AccessLog(str(path))
        log.write(RECORD)
        log.close()
    assert len(lines(path)) == 2


def test_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    log = AccessLog("-")
    log.write(RECORD)
    log.close()
    assert json.loads(capfd.readouterr().out)["request_id"] == "req-1"


@pytest.mark.parametrize("target", ["", "/", "/nowhere/access.log"])
def test_a_target_that_cannot_be_opened_ends_the_start(target: str) -> None:
    with pytest.raises(UsageError, match=r"^--access-log "):
        AccessLog(target)


# -- rotation


def test_a_renamed_file_is_left_within_a_second(path: Path) -> None:
    now = [0.0]
    file = LogFile(str(path), clock=lambda: now[0])

    def give(text: bytes) -> None:
        file.give(memoryview(text))
        while file.busy:
            time.sleep(0.001)

    give(b"first\n")
    old = path.rename(path.with_suffix(".1"))
    now[0] = 0.5
    give(b"second\n")
    now[0] = 1.1
    give(b"third\n")
    path.unlink()
    file.reopen()
    give(b"fourth\n")
    assert file.close(1)
    assert old.read_text() == "first\nsecond\n"
    assert path.read_text() == "fourth\n"


def test_a_file_that_was_copied_and_cut_goes_on_at_its_beginning(log: AccessLog, path: Path) -> None:
    log.write(RECORD)
    settle(log)
    os.truncate(path, 0)
    log.write(RECORD)
    settle(log)
    assert len(lines(path)) == 1


def test_where_the_folder_is_gone_the_old_file_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    log = AccessLog(str(folder / "access.log"))
    folder.rename(tmp_path / "moved")
    log.reopen()
    log.write(RECORD)
    log.close()
    assert len(lines(tmp_path / "moved" / "access.log")) == 1
    assert "cannot be opened anew" in caplog.text
    assert log.lost == 0


# -- a disk that is full, a pipe that nobody reads


def test_a_full_disk_is_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    log = AccessLog("/dev/full")
    for _ in range(3):
        log.write(RECORD)
        log.write(RECORD)
        settle(log)
    settle(log)
    assert log.lost == 6
    log.close()
    assert caplog.text.count("No space left on device") == 1


def test_the_lost_lines_are_told_of_once_there_is_room(log: AccessLog, path: Path) -> None:
    assert log._file is not None
    full, good = os.open("/dev/full", os.O_WRONLY), log._file._fd
    log._file._fd = full
    log.write(RECORD)
    settle(log)
    log._file._fd = good
    os.close(full)
    for _ in range(3):
        log.write(RECORD)
        settle(log)
    assert log.lost == 1
    assert [line.get("lost") for line in lines(path)] == [None, None, 1, None]


def test_a_line_that_was_cut_by_a_full_disk_does_not_spoil_the_next() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    os.write(write, b"x" * (65536 - 4096))
    file = LogFile(f"/dev/fd/{write}")
    file._closing.set()  # so that it does not wait for a reader
    file.give(memoryview(b"a" * 4097 + b"\nb\n"))
    while file.busy:
        time.sleep(0.001)
    assert file.lost == 2
    assert file.failing
    os.read(read, 65536 - 4096)
    file.give(memoryview(b"c\n"))
    assert file.close(2)
    assert os.read(read, 65536) == b"a" * 4096 + b"\nc\n"
    os.close(read)
    os.close(write)


def test_a_reader_that_left_takes_nothing_down() -> None:
    read, write = os.pipe()
    log = AccessLog(f"/dev/fd/{write}")
    os.close(read)
    log.write(RECORD)
    settle(log)
    log.write(RECORD)
    log.close()
    os.close(write)
    assert log.lost == 2


def test_while_the_disk_is_stuck_lines_are_dropped_and_nothing_waits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    read, write = os.pipe()
    log = AccessLog(f"/dev/fd/{write}", max_bytes=1 << 20)
    begun = time.monotonic()
    for _ in range(10_000):
        log.write(RECORD)
        log.flush()
    assert time.monotonic() - begun < 2
    assert 10_000 - 3_500 * 3 < log.lost < 10_000
    assert len(log._buffer) <= 1 << 20
    pieces: list[bytes] = []

    def drain() -> None:
        while piece := os.read(read, 1 << 20):
            pieces.append(piece)

    reader = threading.Thread(target=drain)
    reader.start()
    settle(log)
    settle(log)
    log.close()
    os.close(write)
    reader.join()
    os.close(read)
    told = [json.loads(line) for line in b"".join(pieces).splitlines()]
    assert sum("request_id" in line for line in told) + log.lost == 10_000
    assert sum(line.get("lost", 0) for line in told) == log.lost


def test_closing_does_not_wait_for_a_reader_that_never_reads(caplog: pytest.LogCaptureFixture) -> None:
    read, write = os.pipe()
    log = AccessLog(f"/dev/fd/{write}")
    for _ in range(1000):
        log.write(RECORD)
    begun = time.monotonic()
    log.close(seconds=0.1)
    assert time.monotonic() - begun < 1
    assert "could not be written" in caplog.text
    os.close(read)
    os.close(write)


def test_a_line_costs_little(log: AccessLog) -> None:
    """Some 3 µs where it was measured; the bound only catches what is grossly wrong."""
    begun = time.thread_time()
    for _ in range(2000):
        log.write(RECORD)
    assert (time.thread_time() - begun) / 2000 < 50e-6
