"""Where the KV events of a replica come from: what --kv-events says, or what the engine itself answers."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from kvgate.errors import UsageError
from server.replica import EngineUrl

PATH = "/kv_event_sources"  # vLLM 0.32 and later; it asks for no key
LONGEST_SOCKET_PATH = 107  # bytes, on Linux

_TCP = re.compile(r"tcp://(?P<host>\{host\}|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+|\*):(?P<port>[0-9]{1,5})")
_NEXT_ADDRESS = re.compile(r"\+(?=(?:tcp|ipc)://)")
_FORM = "give [HOST:PORT=]tcp://host:5557+tcp://host:5657 or ipc:///path, where {host} stands for each engine's host"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one engine process (one data-parallel rank) publishes, and where it replays; None if it does not."""

    publish: str
    replay: str | None = None


Ranks = dict[int, Endpoint]  # by data-parallel rank


@dataclass(frozen=True, slots=True)
class EventSources:
    """What --kv-events says. `named`: replica name -> its ranks; `template`: the ranks of every other, with {host};
    `ask`: whether those that are in neither are asked themselves."""

    ask: bool = False
    named: dict[str, tuple[Endpoint, ...]] = field(default_factory=dict)
    template: tuple[Endpoint, ...] = ()

    @classmethod
    def parse(cls, text: str) -> EventSources:
        """From the setting; raises UsageError. Entries are separated by commas, and the same replica's are its ranks in order."""
        if text == "off":
            return cls()
        ask, named, template = False, dict[str, list[Endpoint]](), list[Endpoint]()
        for entry in text.split(","):
            word = entry.strip()
            if word == "auto":
                ask = True
                continue
            replica, equals, addresses = word.partition("=")
            if not equals or "://" in replica:
                template.append(_endpoint(word, word))
            elif not re.fullmatch(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}", replica):
                raise UsageError(f"--kv-events {word!r}: {replica!r} is not the host:port of an engine")
            else:
                named.setdefault(replica, []).append(_endpoint(addresses, word))
        if ask and template:
            raise UsageError("--kv-events: auto and an endpoint for every engine exclude each other")
        return cls(ask, {name: tuple(ranks) for name, ranks in named.items()}, tuple(template))

    def of(self, url: EngineUrl) -> Ranks | None:
        """The replica's endpoints by rank, empty where it has none; None where it is to be asked."""
        stated = self.named.get(url.name, self.template)
        if not stated and self.ask:
            return None
        return {rank: _at(endpoint, url) for rank, endpoint in enumerate(stated)}


def _endpoint(text: str, entry: str) -> Endpoint:
    addresses = _NEXT_ADDRESS.split(text)
    if len(addresses) > 2:
        raise UsageError(f"--kv-events {entry!r}: more than two addresses; separate data-parallel ranks by commas")
    for address in addresses:
        tcp = _TCP.fullmatch(address)
        if tcp is not None and tcp["host"] == "*":
            raise UsageError(
                f"--kv-events {entry!r}: the gateway connects, so name the host in place of *, or say {{host}}"
            )
        if tcp is not None and 1 <= int(tcp["port"]) <= 65535:
            continue
        path = address.removeprefix("ipc://")
        if path == address or not path.startswith("/") or len(path.encode()) > LONGEST_SOCKET_PATH:
            raise UsageError(f"--kv-events {entry!r}: {address!r} is no endpoint; {_FORM}")
    return Endpoint(addresses[0], addresses[1] if len(addresses) == 2 else None)


def _at(endpoint: Endpoint, url: EngineUrl) -> Endpoint:
    host = f"[{url.host}]" if ":" in url.host else url.host
    replay = endpoint.replay
    return Endpoint(endpoint.publish.replace("{host}", host), replay and replay.replace("{host}", host))


class Unreachable(ValueError):
    """The engine publishes events where the gateway cannot hear them. The text says why and what to do."""


def told_by_engine(answer: bytes, url: EngineUrl) -> Ranks:
    """The ranks that an engine's answer to PATH names, as seen from here. Raises ValueError where it is no such answer, and
    Unreachable."""
    page = orjson.loads(answer)
    if isinstance(page, dict):
        entries = [(int(rank), entry) for rank, entry in page.items()]
    elif isinstance(page, list):
        entries = [(_rank(entry), entry) for entry in page if isinstance(entry, dict)]
    else:
        raise ValueError("neither a map nor a list")
    ranks: Ranks = {}
    for rank, entry in sorted(entries, key=lambda item: item[0]):
        if not isinstance(entry, dict) or not entry.get("enable_kv_cache_events", True):
            continue
        replay = entry.get("replay_endpoint")
        ranks[rank] = Endpoint(_reach(entry.get("endpoint"), url), None if replay is None else _reach(replay, url))
    return ranks


def _rank(entry: dict[str, Any]) -> int:
    rank = entry.get("data_parallel_rank")
    if rank is None:
        return 0
    if type(rank) is not int:
        raise ValueError("a data-parallel rank is no whole number")
    return rank


def _reach(address: Any, url: EngineUrl) -> str:
    """An address that the engine binds, as one to connect to."""
    if not isinstance(address, str):
        raise ValueError("an endpoint is not a text")
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if not _is_local(url.host) or not Path(path).is_socket():
            raise Unreachable(
                f"its events come over {address}, which is not on this machine: let vLLM bind tcp://*:5557"
            )
        return address
    tcp = _TCP.fullmatch(address.replace("tcp://:::", "tcp://[::]:").replace("[::]", "*"))
    if tcp is None:
        raise Unreachable(f"its events come over {address!r}, which cannot be connected to: let vLLM bind tcp://*:5557")
    if tcp["host"] in ("*", "0.0.0.0"):  # noqa: S104 - what the engine binds
        host = f"[{url.host}]" if ":" in url.host else url.host
        return f"tcp://{host}:{tcp['port']}"
    return address


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
