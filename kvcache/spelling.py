"""How prompts and blocks are spelled for the index: as the bytes of their text, or, where that does not work, as token ids.

Text fits byte-level tokenizers: a token's bytes are what it decodes to, and a prompt's are its rendered text. Tokenizers that
normalise text or fall back to bytes are matched by `packed` token ids; the index treats both alike.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

_ID = "I" if array("I").itemsize == 4 else "L"


class Namespace(NamedTuple):
    """What keeps equal text from sharing blocks. One per model where an index serves several."""

    lora: str | None = None
    salt: str | None = None
    model: str = ""


def packed(token_ids: Sequence[int]) -> bytes:
    """A prompt as four bytes a token, ids 0 to 2**32 - 1."""
    return array(_ID, token_ids).tobytes()


def packed_blocks(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The full blocks of token ids; the rest is left out."""
    data = packed(token_ids)
    step = 4 * block_size
    return [data[at : at + step] for at in range(0, len(data) // step * step, step)]


def text_blocks(token_bytes: Sequence[bytes], block_size: int) -> list[bytes]:
    """The full blocks of a text, given the bytes of each of its tokens; the rest is left out."""
    last = len(token_bytes) // block_size * block_size
    return [b"".join(token_bytes[at : at + block_size]) for at in range(0, last, block_size)]


def opaque(identifier: str) -> bytes:
    """One placeholder token of an image, sound or embedding. The first byte never occurs in text."""
    return b"\xff" + blake2b(identifier.encode(), digest_size=8).digest()


def marked(tokens: Sequence[bytes], media: Sequence[tuple[str, int]]) -> list[bytes]:
    """The tokens of one block with placeholders made opaque.

    `media`: (identifier, where it begins, in tokens from the block's first; negative if in an earlier block), as in an
    event's extra keys. From there on the run of equal tokens is the item's.
    """
    spelled = list(tokens)
    for identifier, begins in media:
        at = max(0, begins)
        if at >= len(tokens):
            continue
        placeholder, spelling = tokens[at], opaque(identifier)
        while at < len(tokens) and tokens[at] == placeholder:
            spelled[at] = spelling
            at += 1
    return spelled
