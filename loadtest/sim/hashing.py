"""The chained hash of a KV block, as vLLM 0.32 computes it with its default algorithm, sha256 over pickle.

vLLM: v1/core/kv_cache_utils.py, hash_block_tokens and generate_block_hash_extra_keys.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass

BlockHash = bytes
Key = tuple[str, ...]  # tagged with its source: ("lora", name, path) or ("cache_salt", salt)


def _sha256(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


NONE_HASH: BlockHash = _sha256("vllm-none-hash")  # the parent of a first block


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter. Its path is part of the hash: the name alone may be pointed at other weights later."""

    name: str
    path: str
    number: int  # vLLM's adapter id, from 1


def extra_keys(index: int, lora: Lora | None, salt: str | None) -> tuple[Key, ...] | None:
    """What block number `index` of a request is keyed by besides its tokens. The salt counts in the first block only."""
    keys: tuple[Key, ...] = (("lora", lora.name, lora.path),) if lora else ()
    if salt and index == 0:
        keys += (("cache_salt", salt),)
    return keys or None


def hash_block(parent: BlockHash | None, tokens: Sequence[int], keys: tuple[Key, ...] | None) -> BlockHash:
    return _sha256((parent or NONE_HASH, tuple(tokens), keys))


def event_id(block_hash: BlockHash) -> int:
    """How a KV event names the block: the low 64 bits."""
    return int.from_bytes(block_hash[-8:], "big")
