"""Engines that a file lists."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import orjson

from kvgate.errors import UsageError
from server.replica import EngineUrl

logger = logging.getLogger("kvgate")

_MAX_BYTES = 1024 * 1024


class FileSource:
    """A file of one URL a line (# begins a comment) or a JSON array of URLs; read again whenever it changes.

    A file that cannot be read, is wrong in any line or names no engine changes nothing: the last good one stays, with one
    warning for each kind of fault. interval: seconds between two looks.
    """

    def __init__(self, path: Path, interval: float = 1.0) -> None:
        """Reads the file; raises UsageError if it is not good."""
        self._path = path
        self._fault = ""
        self.interval = interval
        self._seen = self._mark()
        self._urls = self._read()

    async def look(self) -> frozenset[EngineUrl]:
        await asyncio.to_thread(self._refresh)  # a file may lie on a network
        return self._urls

    def _refresh(self) -> None:
        seen = self._mark()
        if seen == self._seen and not self._fault:
            return
        try:
            urls = self._read()
        except UsageError as error:
            if str(error) != self._fault:
                self._fault = str(error)
                logger.warning("%s; the engines stay as they are", error)
            return
        if self._fault or urls != self._urls:
            logger.info("%s names %d engines", self._path, len(urls))
        self._seen, self._urls, self._fault = seen, urls, ""

    def _mark(self) -> tuple[int, int, int] | None:
        """What changes with the file. (Kubernetes swaps a link to it: the inode is then another.)"""
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _read(self) -> frozenset[EngineUrl]:
        try:
            with self._path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise UsageError(f"--engines-file {self._path}: {error.strerror or error}") from None
        if len(content) > _MAX_BYTES:
            raise UsageError(f"--engines-file {self._path} is larger than {_MAX_BYTES} bytes")
        return parse_engines(content, f"--engines-file {self._path}:")


def parse_engines(content: bytes, source: str) -> frozenset[EngineUrl]:
    """The engines of a file; `source` names it in the UsageError of a wrong one."""
    if content.lstrip().startswith(b"["):
        texts = _json(content, source)
    else:
        try:
            lines = content.decode("utf-8").splitlines()
        except UnicodeDecodeError:
            raise UsageError(f"{source} it is not text") from None
        texts = [text for line in lines if (text := line.partition("#")[0].strip())]
    urls = [EngineUrl.parse(text, source) for text in texts]
    if not urls:
        raise UsageError(f"{source} it names no engine")
    names = [url.name for url in urls]
    if len(set(names)) != len(names):
        raise UsageError(f"{source} it names the same engine twice")
    return frozenset(urls)


def _json(content: bytes, source: str) -> list[str]:
    try:
        entries: Any = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{source} it is not valid JSON: {error}") from None
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise UsageError(f'{source} it is not a JSON array of URLs like ["http://127.0.0.1:8001"]')
    return entries
