"""A trace of block hashes, made into prompts whose shared beginnings are exactly the trace's.

One JSON object a line: `timestamp` in ms, `input_length` and `output_length` in tokens, `hash_ids` of blocks of 512 tokens,
where an id implies its predecessors (Mooncake's format). A block of 512 tokens becomes one of 16 words, each word one token,
and lengths shrink alike: hits and evictions are block for block those of the trace on engines with 32 times the memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvgate.errors import UsageError
from loadtest.sim.text import WORDS

TRACE_BLOCK = 512  # tokens, in the trace
BLOCK = 16  # tokens, here
SHRINK = TRACE_BLOCK // BLOCK
QUANTUM = 3.0  # s to which timestamps are rounded down
SEED = 1


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. at: seconds of the trace since its first. blocks: ids; the last block may be partial. tokens and output are
    those of the prompt and of the answer here, not in the trace. session: what names its conversation.
    """

    at: float
    blocks: tuple[int, ...]
    tokens: int
    output: int

    @property
    def session(self) -> str:
        """Every prompt of the trace begins with the same block, so the next one tells conversations apart."""
        return f"session-{self.blocks[min(1, len(self.blocks) - 1)]}"


def read(path: Path, count: int) -> list[Ask]:
    """The trace's first `count` requests, in the order of their times. Raises UsageError that names the line."""
    rows = list(_rows(path, count))
    if not rows:
        raise UsageError(f"--trace {path}: there is no request in it")
    return [
        Ask(at, tuple(row["hash_ids"]), _shrunk(row["input_length"]), _shrunk(row["output_length"]))
        for at, row in zip(spread([row["timestamp"] / 1000 for row in rows]), rows, strict=True)
    ]


def _rows(path: Path, count: int) -> Iterator[dict[str, Any]]:
    try:
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                if number > count:
                    return
                row = json.loads(line)
                if len(row["hash_ids"]) != -(-int(row["input_length"]) // TRACE_BLOCK):
                    raise ValueError(f"its blocks are not of {TRACE_BLOCK} tokens")
                row["timestamp"] + row["output_length"]
                yield row
    except OSError as error:
        raise UsageError(f"--trace {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--trace {path}, line {number}: {error!r}") from None


def _shrunk(tokens: int) -> int:
    return max(1, -(-tokens // SHRINK))


def spread(times: Sequence[float], quantum: float = QUANTUM) -> list[float]:
    """Times in seconds that were rounded down to a grid, put anywhere between their point of it and the next, by a seed; the
    order stays. The first is at 0."""
    draw = np.random.default_rng(SEED).random(len(times))
    points = sorted(set(times))
    until = {
        here: min(after, here + quantum)
        for here, after in zip(points, [*points[1:], points[-1] + quantum], strict=True)
    }
    spread = sorted(here + part * (until[here] - here) for here, part in zip(times, draw, strict=True))
    return [float(at - spread[0]) for at in spread]


def words(block: int) -> list[int]:
    """The numbers of a block's words."""
    digest = hashlib.sha256(b"%d/%d" % (SEED, block)).digest()
    return [value % len(WORDS) for value in np.frombuffer(digest, "<u2").tolist()]


def numbers(ask: Ask) -> list[int]:
    """One for each token of the prompt: equal numbers are equal tokens."""
    return [word for block in ask.blocks for word in words(block)][: ask.tokens]


def text(ask: Ask) -> str:
    """The prompt."""
    return "".join(f" {WORDS[word]}" for word in numbers(ask))
