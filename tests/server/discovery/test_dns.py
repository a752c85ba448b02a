"""Engines behind a DNS name: every address is one, and a resolver that fails changes nothing."""

import asyncio
import logging
import socket
from collections.abc import Collection

import pytest

from kvgate.errors import UsageError
from server.discovery.dns import DnsSource, resolve
from server.replica import EngineUrl


class Resolver:
    """Answers what it is told to: addresses, an error, or nothing at all (None)."""

    def __init__(self, *answer: str) -> None:
        self.answer: Collection[str] | Exception | None = answer
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, name: str, port: int) -> Collection[str]:
        self.asked.append((name, port))
        if self.answer is None:
            await asyncio.sleep(3600)
        if isinstance(self.answer, Exception):
            raise self.answer
        assert self.answer is not None
        return self.answer


def names(urls: frozenset[EngineUrl]) -> set[str]:
    return {str(url) for url in urls}


async def test_every_address_is_an_engine() -> None:
    resolver = Resolver("10.1.0.1", "10.1.0.2", "fd00::7")
    source = DnsSource.parse("dns://vllm.models.svc:8000", resolve=resolver)
    assert names(await source.look()) == {"http://10.1.0.1:8000", "http://10.1.0.2:8000", "http://[fd00::7]:8000"}
    assert resolver.asked == [("vllm.models.svc", 8000)]
    resolver.answer = ["10.1.0.2"]
    assert names(await source.look()) == {"http://10.1.0.2:8000"}


@pytest.mark.parametrize(
    "failure", [socket.gaierror(socket.EAI_NONAME, "not known"), OSError("refused"), UnicodeError("label"), [], None]
)
async def test_a_failing_resolver_keeps_the_last_answer_and_warns_once(
    failure: Exception | list[str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    resolver = Resolver("10.1.0.1")
    source = DnsSource("vllm", 8000, resolve=resolver, timeout=0.01)
    good = await source.look()
    with caplog.at_level(logging.WARNING):
        resolver.answer = failure
        assert [await source.look() for _ in range(3)] == [good] * 3
        assert len(caplog.records) == 1
        assert "cannot resolve vllm: " in caplog.text
        assert "1 engines stay" in caplog.text
        resolver.answer = ["10.1.0.9"]
        assert names(await source.look()) == {"http://10.1.0.9:8000"}
        resolver.answer = failure
        await source.look()
        assert len(caplog.records) == 2


async def test_a_name_that_is_unknown_at_the_start_is_no_engine_yet() -> None:
    assert await DnsSource("vllm", 8000, resolve=Resolver()).look() == frozenset()


async def test_the_system_s_resolver_knows_localhost() -> None:
    assert "127.0.0.1" in await resolve("localhost", 8000)
    assert await resolve("127.0.0.1", 1) == {"127.0.0.1"}
    with pytest.raises(OSError):  # noqa: PT011  which one depends on the resolver
        await resolve("no-such-name.invalid", 8000)


@pytest.mark.parametrize("text", ["dns://name", "dns://:80", "dns://name:80/x", "dns://name:99999", "dns://u@name:1"])
def test_a_wrong_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--engine "):
        DnsSource.parse(text)
