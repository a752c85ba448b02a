"""A model that spells by token ids, for tests."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.spelling import Namespace, marked, packed, packed_blocks
from server.ledger.feed import Media

KNOWN_TOKENS = 100_000


class PackedSpeller:
    def blocks(self, token_ids: Sequence[int], block_size: int, media: Media) -> list[bytes]:
        if any(token >= KNOWN_TOKENS for token in token_ids):
            raise ValueError("no such token")
        blocks = packed_blocks(token_ids, block_size)
        for number, items in media.items():
            tokens = [packed([token]) for token in token_ids[number * block_size : (number + 1) * block_size]]
            blocks[number] = b"".join(marked(tokens, items))
        return blocks

    def namespace(self, lora: str | None, salt: str | None) -> Namespace:
        return Namespace(lora, salt)


PLAIN = Namespace()
