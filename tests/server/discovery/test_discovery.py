"""Several sources together, and what is handed on."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from kvgate.errors import UsageError
from server.discovery.discovery import Discovery, sources_for
from server.discovery.dns import DnsSource
from server.discovery.file import FileSource
from server.discovery.source import StaticSource
from server.replica import EngineUrl


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


class Changing:
    """A source whose answer the test changes."""

    interval = 0.01

    def __init__(self, *texts: str) -> None:
        self.urls = frozenset(map(EngineUrl.parse, texts))
        self.fault: Exception | None = None

    async def look(self) -> frozenset[EngineUrl]:
        if self.fault:
            raise self.fault
        return self.urls


async def test_what_any_source_wants_is_wanted() -> None:
    seen: list[set[str]] = []
    changing = Changing("http://b:1")
    static = StaticSource([EngineUrl.parse("http://a:1"), EngineUrl.parse("http://b:1")])
    discovery = Discovery([static, changing], lambda wanted: seen.append({str(url) for url in wanted}))
    await discovery.start()
    assert seen == [{"http://a:1", "http://b:1"}]  # at once, before the gateway says that it is ready
    changing.urls = frozenset([EngineUrl.parse("http://c:1")])
    await until(lambda: seen[-1] == {"http://a:1", "http://b:1", "http://c:1"})
    await discovery.stop()
    count = len(seen)
    await asyncio.sleep(0.05)
    assert len(seen) == count


async def test_a_fault_is_logged_and_does_not_end_it(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[frozenset[EngineUrl]] = []
    changing = Changing("http://a:1")
    discovery = Discovery([changing], seen.append)
    await discovery.start()
    with caplog.at_level(logging.ERROR):
        changing.fault = RuntimeError("unforeseen")
        await until(lambda: bool(caplog.records))
    changing.fault = None
    count = len(seen)
    await until(lambda: len(seen) > count)
    await discovery.stop()
    assert "unforeseen" in caplog.text


def test_the_command_line_names_sources(tmp_path: Path) -> None:
    file = tmp_path / "engines"
    file.write_text("http://c:1")
    engines = ["http://a:1", "dns://vllm:8000", "dns://vllm:8000", "http://b:1"]
    static, dns, listed = sources_for(engines, str(file), interval=7.0)
    assert isinstance(static, StaticSource)
    assert isinstance(dns, DnsSource)
    assert isinstance(listed, FileSource)
    assert (static.interval, dns.interval, listed.interval) == (None, 7.0, 1.0)
    assert sources_for([]) == []


@pytest.mark.parametrize(
    ("engines", "says"),
    [
        (["http://a:1", "http://a:1/"], "the same engine twice"),
        (["dns://vllm"], "not of the form dns://name:port"),
        (["vllm:8000"], "not a URL"),
    ],
)
def test_a_wrong_one_is_refused(engines: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        sources_for(engines)


def test_a_wrong_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--engines-file"):
        sources_for([], str(tmp_path / "none"))
