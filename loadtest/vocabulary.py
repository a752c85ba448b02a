"""Token ids drawn from a seed: the same on every machine and in every process, and no text, so lengths are exact."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint32]

_IDS_PER_DIGEST = 8  # 32 bytes of sha256 are eight 32-bit numbers


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The half-open range [low, high) of token ids that prompts are made of.

    The default range, 1000:30000, holds plain words and word pieces in common vocabularies (Llama, Qwen, Mistral,
    Gemma, SmolLM): special and byte tokens lie below or far above it.
    """

    low: int = 1000
    high: int = 30000

    def __post_init__(self) -> None:
        if self.low < 0 or self.high - self.low < 2:
            raise ValueError("a vocabulary needs LOW:HIGH with 0 <= LOW and at least two ids below HIGH")

    @property
    def span(self) -> int:
        return self.high - self.low

    @classmethod
    def parse(cls, text: str) -> Vocabulary:
        """From `LOW:HIGH`. Raises ValueError."""
        low, colon, high = text.partition(":")
        if not colon:
            raise ValueError("expected LOW:HIGH, such as 1000:30000")
        return cls(int(low), int(high))

    def __str__(self) -> str:
        return f"{self.low}:{self.high}"


def numbers(seed: int, name: str, count: int) -> Ids:
    """`count` uniform 32-bit numbers: digest i is sha256 of the seed, the name and i. The name keeps uses apart."""
    key = f"kvgate/{seed}/{name}/".encode()
    digests = b"".join(hashlib.sha256(key + b"%d" % i).digest() for i in range(-(-count // _IDS_PER_DIGEST)))
    return np.frombuffer(digests, dtype="<u4")[:count].astype(np.uint32)


def draw(seed: int, name: str, count: int, vocabulary: Vocabulary, ordinal: int = 0) -> Ids:
    """`count` token ids under a name `.../<sibling>`.

    Siblings (names that differ in the last part) get distinct first ids, by their ordinal, so that two of them can
    never agree by chance on even one token: what they share is exactly what was planned.
    """
    ids = vocabulary.low + numbers(seed, name, count) % np.uint32(vocabulary.span)
    family = name.rpartition("/")[0]
    base = int(numbers(seed, family + "/first", 1)[0])
    if count:
        ids[0] = vocabulary.low + (base + ordinal) % vocabulary.span
    return ids.astype(np.uint32)


def fingerprint(ids: Ids) -> str:
    """sha256 of the ids as little-endian 32-bit numbers, in hex."""
    return hashlib.sha256(ids.astype("<u4").tobytes()).hexdigest()
