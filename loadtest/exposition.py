"""Reads the Prometheus text format: just enough to get an engine's counters and labels. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


def samples(text: str) -> Iterator[Sample]:
    """Every sample line; comments and lines that are none are passed over."""
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        pairs = {key: _ESCAPE.sub(_unescape, raw) for key, raw in _LABEL.findall(labels or "")}
        yield Sample(name, pairs, number)


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def total(found: list[Sample], name: str) -> float | None:
    """The sum over all series of a metric; None when there is none of it: absent is unknown, not 0."""
    values = [sample.value for sample in found if sample.name == name]
    return sum(values) if values else None
