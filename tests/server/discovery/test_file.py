"""The file of engines: read again when it changes, and never worse than its last good state."""

import asyncio
import logging
import os
from pathlib import Path

import pytest

from kvgate.errors import UsageError
from server.discovery.file import FileSource, parse_engines
from server.replica import EngineUrl

A, B = EngineUrl("http", "10.0.0.1", 8001), EngineUrl("https", "engine-b", 443)


def look(source: FileSource) -> frozenset[EngineUrl]:
    return asyncio.run(source.look())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "engines"
    path.write_text("http://10.0.0.1:8001\n")
    return path


@pytest.mark.parametrize(
    "content",
    [
        b"http://10.0.0.1:8001\nhttps://engine-b\n",
        b"# ours\r\n\r\n  http://10.0.0.1:8001  # the first\r\nhttps://engine-b",
        b' ["http://10.0.0.1:8001", "https://engine-b/"]\n',
    ],
)
def test_lines_and_json_are_the_same(content: bytes) -> None:
    assert parse_engines(content, "f:") == {A, B}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "names no engine"),
        (b"# none\n", "names no engine"),
        (b"[]", "names no engine"),
        (b'["http://a:1"', "not valid JSON"),
        (b'["http://a:1", 2]', "not a JSON array of URLs"),
        (b"http://a:1\nnonsense\n", "'nonsense' is not a URL"),
        (b"http://a:1\nhttps://a:1\n", "the same engine twice"),
        (b"\xff\xfe", "not text"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(content: bytes, says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        parse_engines(content, "--engines-file f:")
    assert str(error.value).startswith("--engines-file f: ")


def test_a_file_that_is_not_there_at_the_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        FileSource(tmp_path / "none")


def test_a_huge_file_is_refused(path: Path) -> None:
    path.write_bytes(b"#" * 2_000_000)
    with pytest.raises(UsageError, match="larger than"):
        FileSource(path)


def test_it_follows_the_file(path: Path) -> None:
    source = FileSource(path)
    assert look(source) == {A}
    path.write_text("http://10.0.0.1:8001\nhttps://engine-b\n")
    assert look(source) == {A, B}
    other = path.with_name("other")  # as Kubernetes and careful editors do: a new file takes the name
    other.write_text("https://engine-b\n")
    other.replace(path)
    assert look(source) == {B}


def test_a_file_that_has_not_changed_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FileSource(path)
    monkeypatch.setattr(source, "_read", lambda: pytest.fail("it was read"))
    assert look(source) == {A}


@pytest.mark.parametrize("fault", ["nonsense\n", "", "[", None])
def test_a_broken_file_keeps_the_last_good_one_and_warns_once(
    path: Path, caplog: pytest.LogCaptureFixture, fault: str | None
) -> None:
    caplog.set_level(logging.INFO)
    source = FileSource(path)
    before = path.stat()
    if fault is None:
        path.unlink()
    else:
        path.write_text(fault)
    for _ in range(3):
        assert look(source) == {A}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "stay as they are" in caplog.text
    path.write_text("http://10.0.0.1:8001\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # mended to exactly what it was
    assert look(source) == {A}
    path.write_text("https://engine-b\n")
    assert look(source) == {B}
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO"]
