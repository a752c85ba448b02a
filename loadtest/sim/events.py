"""KV events as vLLM 0.32 publishes them: maps with a "type", in arrays of [time, events, rank], as msgpack.

vLLM: distributed/kv_events.py. They carry prompt tokens and ask for no key: private sockets or loopback only.
"""

from __future__ import annotations

import msgspec

from loadtest.sim.blocks import Event, Removed, Stored
from loadtest.sim.hashing import event_id

MEDIUM = "GPU"  # also what the CPU backend says


class KVCacheEvent(msgspec.Struct, omit_defaults=True, tag=True):
    """The field order is the wire's."""


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """ts: seconds since the epoch."""

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None


def to_wire(event: Event) -> WireEvent:
    if isinstance(event, Stored):
        return BlockStored(
            block_hashes=[event_id(block_hash) for block_hash in event.hashes],
            parent_block_hash=None if event.parent is None else event_id(event.parent),
            token_ids=event.tokens.tolist(),
            block_size=event.block_size,
            lora_id=event.lora.number if event.lora else None,
            medium=MEDIUM,
            lora_name=event.lora.name if event.lora else None,
            # untagged, unlike in the hash: the LoRA's name without its path
            extra_keys=[tuple(key[1] for key in keys) if keys else None for keys in event.keys],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
            session_id=event.session,
        )
    if isinstance(event, Removed):
        return BlockRemoved([event_id(event.hash)], MEDIUM, 0)
    return AllBlocksCleared()
