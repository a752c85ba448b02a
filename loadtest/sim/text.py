"""What a simulated engine writes: words drawn from the tokens before them, so that the same prompt gives the same answer.

Each word is one token, and stays one when the text is tokenised again within a later prompt: an answer that comes back as
history hits the blocks that its tokens were stored in.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

FIRST_WORDS = ("The", "One", "All", "Now", "How", "Our", "Yes", "Two")
_LINES = (
    "the and for not but all any can day did get had has her him his how its may new now old one our out own see set she",
    "two use was way who why yes yet you act add age air big box buy car cut dog eat end eye far few fly fun gas got hot",
    "job key law lay led let lie lot low man map men met mix net nor off oil pay per put ran red run sat say sea sit six",
    "son sun ten tax top try war win won",
)
WORDS = tuple(word for line in _LINES for word in line.split())

_MULTIPLIER = 6364136223846793005  # Knuth's, of a linear congruential generator
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Words:
    """Tokens and their text: `first` may begin an answer, `others` go on with it."""

    first: Mapping[int, str]
    others: Mapping[int, str]

    @classmethod
    def find(cls, encode: Callable[[str], Sequence[int]], decode: Callable[[Sequence[int]], str]) -> Words:
        """Those words that are one token each, alone and after another. Raises ValueError where there are none."""
        first, others = {}, {}
        for word in FIRST_WORDS:
            ids = encode(word)
            if len(ids) == 1 and decode(ids).strip() == word:
                first[ids[0]] = word
        for word in WORDS:
            ids = encode(twice := f"The {word} {word}")
            if len(ids) == 3 and ids[1] == ids[2] and decode(ids).strip() == twice:
                others[ids[1]] = f" {word}"
        if not first or not others:
            raise ValueError(
                "the tokenizer has no token for any short English word, and the simulator writes with those"
            )
        return cls(first, others)


class Writer:
    """Writes one answer. variant: which of several answers to one prompt. script: what it begins with, word for word.

    length: tokens after which `eos` comes; None never.
    """

    __slots__ = ("_first", "_others", "_script", "_state", "_words", "_written", "eos", "length")

    def __init__(
        self,
        words: Words,
        prompt: array[int],
        *,
        variant: int = 0,
        eos: int = 0,
        script: Sequence[int] = (),
    ) -> None:
        self._words = words
        self._first, self._others = tuple(words.first), tuple(words.others)
        self._state = zlib.crc32(prompt, variant)
        self._written = 0
        self.length: int | None = None
        self._script = script
        self.eos = eos

    def next(self) -> int:
        self._state = (self._state * _MULTIPLIER + 1442695040888963407) & _MASK
        choices = self._others if self._written else self._first
        token = choices[(self._state >> 33) % len(choices)]
        if self._written < len(self._script):
            token = self._script[self._written]
        elif self._written == self.length:
            token = self.eos
        self._written += 1
        return token

    def natural_length(self, mean: int) -> int:
        """Tokens of an answer that nothing cuts off, without its end: drawn from the prompt, between 1 and 2 × mean - 1."""
        return 1 + (self._state * _MULTIPLIER >> 7) % max(1, 2 * mean - 1)

    def text(self, number: int, token: int) -> str | None:
        """Of the answer's token number `number`, None where it is none of the words."""
        return (self._words.others if number else self._words.first).get(token)
