"""The chained hash of a KV block: vLLM 0.32's own, sha256 over pickle, or a fast one that costs 0.1 µs a block.

vLLM: v1/core/kv_cache_utils.py, hash_block_tokens and generate_block_hash_extra_keys. Both tell the same prefixes apart; only
an outside program that computes vLLM's hashes itself needs the first.
"""

from __future__ import annotations

import hashlib
import pickle
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

BlockHash = bytes | int  # all of sha256, or the 64 bits of the fast hash
Key = tuple[str, ...]  # tagged with its source: ("lora", name, path) or ("cache_salt", salt)
Words = npt.NDArray[np.uint64]

TOKEN = "I" if array("I").itemsize == 4 else "L"  # arrays of token ids: 0 to 2**32 - 1, four bytes each


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


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks of one request that follow each other. first: the number of the first; parent: the hash before it, if any."""

    size: int
    first: int
    parent: BlockHash | None
    lora: Lora | None
    salt: str | None


Algorithm = Callable[[Chain, "array[int]"], list[BlockHash]]


def sha256_chain(chain: Chain, tokens: array[int]) -> list[BlockHash]:
    """The hashes of the full blocks of `tokens`, which begin at the chain's first."""
    parent: BlockHash | None = chain.parent
    hashes: list[BlockHash] = []
    for number in range(len(tokens) // chain.size):
        part = tokens[number * chain.size : (number + 1) * chain.size]
        parent = hash_block(parent, part, extra_keys(chain.first + number, chain.lora, chain.salt))
        hashes.append(parent)
    return hashes


def fast_chain(chain: Chain, tokens: array[int]) -> list[BlockHash]:
    """The same in 64 bits, for all blocks at once.

    A block's digest is a sum of its tokens times fixed odd numbers; a prefix's hash is the sum of its blocks' mixed
    digests times an odd number for their place.
    """
    count = len(tokens) // chain.size
    if not count:
        return []
    ids = np.frombuffer(tokens, np.uint32, count * chain.size).astype(np.uint64) + np.uint64(1)  # a 0 counts, too
    digests = _mix((ids.reshape(count, chain.size) * _odd(0, chain.size)).sum(axis=1, dtype=np.uint64))
    digests *= _odd(1 << 32, chain.first + count)[chain.first :]
    digests[:1] += np.uint64(_start(chain))
    hashes: list[BlockHash] = np.cumsum(digests, dtype=np.uint64).tolist()
    return hashes


ALGORITHMS: Mapping[str, Algorithm] = {"sha256": sha256_chain, "fast": fast_chain}


def event_id(block_hash: BlockHash) -> int:
    """How a KV event names the block: the low 64 bits."""
    return block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")


def _start(chain: Chain) -> int:
    if chain.parent is not None:
        return event_id(chain.parent)
    key: Any = (chain.lora and (chain.lora.name, chain.lora.path), chain.salt or None)
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def _odd(stream: int, count: int) -> Words:
    """`count` fixed odd numbers of 64 bits; their beginning does not depend on count."""
    return _odd_numbers(stream, 1 << max(6, (count - 1).bit_length()))[:count]


@lru_cache(maxsize=64)
def _odd_numbers(stream: int, count: int) -> Words:
    return _mix(np.arange(stream + 1, stream + 1 + count, dtype=np.uint64)) | np.uint64(1)


def _mix(values: Words) -> Words:
    """splitmix64's finaliser: each bit of the input turns half the bits of the output."""
    values = values * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
