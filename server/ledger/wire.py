"""vLLM's KV events, from frames of ZeroMQ to values. Nothing that arrives raises anything but BrokenFrame.

Versions differ. Events are maps with a "type" (vLLM 0.24 and later) or arrays that begin with it, trailing defaults left out;
block hashes are integers or bytes. Fields and event types that are not known here are passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from kvcache.replica import Hash

END = b"\xff" * 8  # in place of a sequence number: the replay is over

Token = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**24)]
GroupNumber = Annotated[int, msgspec.Meta(ge=0, le=2**16)]


class BrokenFrame(ValueError):
    """Not what vLLM publishes. The text never holds any of it: events carry prompts."""


class Stored(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    """Consecutive blocks, one hash and one entry of `extra_keys` each; `token_ids` of all of them, or fewer where a window left
    blocks out. The order of the fields is that of the array form."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None = None
    token_ids: list[Token] = []
    block_size: Size = 0  # tokens
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: GroupNumber | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: Size | None = None  # tokens


class Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    """One copy less of each block."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: GroupNumber | None = None


class Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    """Nothing is held any more."""


class _StoredArray(Stored, array_like=True, tag_field="type", tag="BlockStored", gc=False):
    pass


class _RemovedArray(Removed, array_like=True, tag_field="type", tag="BlockRemoved", gc=False):
    pass


class _ClearedArray(Cleared, array_like=True, tag_field="type", tag="AllBlocksCleared", gc=False):
    pass


Event = Stored | Removed | Cleared


class _MapKind(msgspec.Struct, gc=False):
    type: str


class _ArrayKind(msgspec.Struct, array_like=True, gc=False):
    type: str


class _BatchMap(msgspec.Struct):
    events: list[msgspec.Raw]


class _BatchArray(msgspec.Struct, array_like=True):
    ts: msgspec.Raw
    events: list[msgspec.Raw]


_Decoders = dict[str, msgspec.msgpack.Decoder[Any]]


def _decoders(*types: type[msgspec.Struct]) -> _Decoders:
    return {str(kind.__struct_config__.tag): msgspec.msgpack.Decoder(kind) for kind in types}


_map_kind = msgspec.msgpack.Decoder(_MapKind)
_array_kind = msgspec.msgpack.Decoder(_ArrayKind)
_maps = _decoders(Stored, Removed, Cleared)
_arrays = _decoders(_StoredArray, _RemovedArray, _ClearedArray)
_batch_map = msgspec.msgpack.Decoder(_BatchMap)
_batch_array = msgspec.msgpack.Decoder(_BatchArray)

# A nesting too deep or a length too large is refused with errors of Python's own
_MALFORMED = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError)


def numbered(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Sequence number and payload of a published or a replayed batch; None where a replay is over.

    Published: topic, number, payload. Replayed: the same behind an empty frame, in older versions without the topic.
    """
    if len(frames) < 2:
        raise BrokenFrame("too few frames")
    number = frames[-2]
    if not frames[-1] and number in (END, b""):
        return None
    if len(number) != 8 or number == END:
        raise BrokenFrame("no sequence number")
    return int.from_bytes(number, "big"), frames[-1]


def _is_map(data: msgspec.Raw | bytes) -> bool:
    first = memoryview(data)[0]
    return 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)


def batch(payload: bytes) -> list[msgspec.Raw]:
    """The events of a batch, not decoded yet: they refer to the payload."""
    try:
        return _batch_map.decode(payload).events if _is_map(payload) else _batch_array.decode(payload).events
    except (*_MALFORMED, IndexError):
        raise BrokenFrame("not a batch of events") from None


def event(raw: msgspec.Raw | bytes) -> Event | None:
    """One event; None of a type that is not known here."""
    try:
        by_type, kind = (_maps, _map_kind) if _is_map(raw) else (_arrays, _array_kind)
        decoder = by_type.get(kind.decode(raw).type)
        found: Event | None = None if decoder is None else decoder.decode(raw)
    except (*_MALFORMED, IndexError):
        raise BrokenFrame("not an event") from None
    return found


class Keys(msgspec.Struct, frozen=True, gc=False):
    """What a block is keyed by besides its tokens. `media`: (identifier, where it begins, in tokens from the block's first)."""

    salt: str | None = None
    media: tuple[tuple[str, int], ...] = ()
    embeds: tuple[str, ...] = ()  # digests of prompt embeddings


NO_KEYS = Keys()


def keys(entry: Sequence[object] | None, lora: str | None, first: bool) -> Keys:
    """One entry of `extra_keys`. `lora`: the event's; `first`: whether the block begins a prompt.

    vLLM publishes the values bare: the adapter's name, then images as (identifier, offset), then the salt of a first block,
    then digests. Values with their source in front, as they go into the hash, are understood, too.
    """
    if not entry:
        return NO_KEYS
    salt: str | None = None
    media: list[tuple[str, int]] = []
    embeds: list[str] = []
    for at, key in enumerate(entry):
        match key:
            case str() if at == 0 and key == lora:
                continue
            case int() if at == 0:  # an adapter's number, before adapters were named
                continue
            case str() if first and salt is None:
                salt = key
            case str():
                embeds.append(key)
            case bytes():
                embeds.append(key.hex())
            case ["lora", str(), *_]:
                continue
            case ["cache_salt", str(value)]:
                salt = value
            case ["prompt_embeds", bytes(value)]:
                embeds.append(value.hex())
            case [str(identifier), int(begins)] | ["mm", str(identifier), int(begins)]:
                media.append((identifier, begins))
            case _:
                raise BrokenFrame("an extra key of no known form")
    return Keys(salt, tuple(media), tuple(embeds))
