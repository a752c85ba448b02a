"""Applies one engine's events to the index, spelled as the engine's model spells text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Literal, Protocol

from kvcache.copies import CPU, GPU, STORAGE, Group
from kvcache.index import PrefixIndex
from kvcache.spelling import opaque
from server.ledger import wire
from server.ledger.wire import BrokenFrame, Cleared, Event, Keys, Removed, Stored

logger = logging.getLogger("kvgate")

Media = Mapping[int, Sequence[tuple[str, int]]]

SLICE_TOKENS = 1024  # spelled and stored between two pauses, about 0.3 ms
SLICE_HASHES = 256  # removed between two pauses
LOWER_TIERS = (
    8  # blocks in offload tiers, over those of the GPU, once any is announced: engines do not tell how many fit
)

_KINDS: Mapping[str, Literal["full", "window", "state"]] = {
    "full_attention": "full",
    "mla_attention": "full",
    "sink_full_attention": "full",
    "sliding_window": "window",
    "sliding_window_mla": "window",
    "chunked_local_attention": "state",  # its chunk is not told; the last block is needed in any case
    "mamba": "state",
}
_NO_PREFIX = ("encoder_only_attention", "cross_attention")  # groups whose blocks no prompt's prefix can hit


class Speller(Protocol):
    """How a replica's model spells blocks. Implementations raise ValueError for ids that the model does not have."""

    def blocks(self, token_ids: Sequence[int], block_size: int, media: Media) -> list[bytes]:
        """The full blocks of `token_ids`, as the index keys them.

        `media`: for the number of a block among these, the images and sounds in it: (identifier, where it begins, in tokens
        from the block's first; negative if in an earlier block). `kvcache.spelling.marked` takes one block's.
        """
        ...

    def namespace(self, lora: str | None, salt: str | None) -> Hashable:
        """What keeps these blocks apart from others of equal text."""
        ...


class Feed:
    """Between the stream of one engine (one data-parallel rank of it) and its entry in the index.

    `blocks`: the engine's KV blocks. Work is done by iterators that pause after each slice; nobody else may feed the same
    entry meanwhile. `changed` is called after each batch and whenever certainty changes.
    """

    def __init__(
        self,
        index: PrefixIndex,
        name: str,
        blocks: int,
        speller: Speller,
        changed: Callable[[], None] = lambda: None,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self.index = index
        self.name = name
        self.blocks = blocks
        self.speller = speller
        self.broken = 0  # frames and batches that were not what vLLM publishes
        self.events = 0
        self._changed = changed
        self._now = now
        self._lower = False  # blocks in offload tiers were announced
        self._renewed = 0  # blocks stored while uncertain
        self._kinds: dict[int, str] = {}  # groups by number
        self.resize(blocks)

    # -- what the stream says

    def apply(self, payload: bytes) -> Iterator[None]:
        """One batch. A part of it that is broken makes the replica uncertain; what comes before and after is applied."""
        stored = 0
        events: Iterable[Event] = self._events(payload)
        if not self.index.replicas[self.name].block_size:
            events = self._full_first(events)
        for event in events:
            self.events += 1
            if isinstance(event, Cleared):
                self.clear()
                continue
            try:
                yield from self._store(event) if isinstance(event, Stored) else self._remove(event)
            except BrokenFrame as error:
                self.broke(str(error))
            if isinstance(event, Stored) and _tier(event.medium) == GPU:
                stored += len(event.block_hashes)
        self._renew(stored)
        self._changed()

    def _events(self, payload: bytes) -> Iterator[Event]:
        """Those of known types that can be read, one at a time."""
        try:
            raws = wire.batch(payload)
        except BrokenFrame as error:
            self.broke(str(error))
            return
        for raw in raws:
            try:
                event = wire.event(raw)
            except BrokenFrame as error:
                self.broke(str(error))
                continue
            if event is not None:
                yield event

    def broke(self, why: str) -> None:
        """A frame or batch could not be read, and may have said anything."""
        self.broken += 1
        self.doubt(why)

    def clear(self) -> None:
        """The engine holds nothing: told so, restarted, or about to be replayed from its beginning."""
        self.index.clear(self.name, self._now())
        self._kinds.clear()
        self._renewed = 0
        self._changed()

    def doubt(self, why: str) -> None:
        """Events are missing. `why` is for the log."""
        if not self.index.replicas[self.name].doubted:
            logger.info("what %s caches is uncertain: %s", self.name, why)
        self.index.doubt(self.name)
        self._renewed = 0
        self._changed()

    def trust(self) -> None:
        """Every event since the engine began has been applied."""
        self.index.trust(self.name)
        self._changed()

    def resize(self, blocks: int) -> None:
        """The engine's KV blocks, when they become known."""
        self.blocks = blocks
        self.index.add(self.name, blocks * (1 + LOWER_TIERS) if self._lower else blocks)

    # -- the index

    def _renew(self, stored: int) -> None:
        """An uncertain replica that has since stored as many blocks as it has is known again: least recently used ones go
        first, so that of those nobody told of hardly any is left."""
        if not self.index.uncertain(self.name):
            self._renewed = 0
            return
        self._renewed += stored
        if self._renewed >= self.blocks:
            self.index.trust(self.name, forgive=True)
            self._renewed = 0

    def _full_first(self, events: Iterable[Event]) -> Iterator[Event]:
        """Of the first batch, the groups that need whole prefixes first: their block is the one that the index is made of."""
        later: list[Event] = []
        for event in events:
            if isinstance(event, Cleared):
                yield from later
                later.clear()
            elif isinstance(event, Stored):
                self._kinds[event.group_idx or 0] = _kind(event)
            if not isinstance(event, Cleared) and self._kinds.get(event.group_idx or 0, "full") != "full":
                later.append(event)
            else:
                yield event
        yield from later

    def _store(self, event: Stored) -> Iterator[None]:
        if event.kv_cache_spec_kind in _NO_PREFIX or not event.block_hashes:
            return
        hashes, size, tier = event.block_hashes, event.block_size, _tier(event.medium)
        keys = self._keys(event)
        if tier != GPU and not self._lower:
            self._lower = True
            self.resize(self.blocks)
        lora = event.lora_name if event.lora_name or event.lora_id is None else f"#{event.lora_id}"
        namespace = self.speller.namespace(lora, keys[0].salt if 0 in keys else None)
        whole = size > 0 and len(event.token_ids) == len(hashes) * size
        group = self._group(event)
        step = max(1, SLICE_TOKENS // max(1, size))
        parent = event.parent_block_hash
        for at in range(0, len(hashes), step):
            part = hashes[at : at + step]
            blocks = self._spell(event, keys, at, len(part)) if whole else None
            self.index.store(
                self.name,
                part,
                parent=parent,
                blocks=blocks,
                block_size=size,
                namespace=namespace,
                tier=tier,
                group=group,
                now=self._now(),
            )
            parent = part[-1]
            yield

    def _spell(self, event: Stored, keys: Mapping[int, Keys], at: int, count: int) -> list[bytes]:
        size = event.block_size
        media = {
            number - at: found.media for number, found in keys.items() if at <= number < at + count and found.media
        }
        try:
            blocks = self.speller.blocks(event.token_ids[at * size : (at + count) * size], size, media)
        except ValueError:
            raise BrokenFrame("token ids that its model does not have") from None
        for number, found in keys.items():
            if found.embeds and at <= number < at + count:  # the tokens say nothing of such a block
                blocks[number - at] = opaque("embeds " + " ".join(found.embeds))
        return blocks

    def _keys(self, event: Stored) -> dict[int, Keys]:
        """By the number of the block; only blocks that have any."""
        if not event.extra_keys:
            return {}
        if len(event.extra_keys) != len(event.block_hashes):
            raise BrokenFrame("not one entry of extra keys for each block")
        first = event.parent_block_hash is None
        found = {
            number: wire.keys(entry, event.lora_name, first and number == 0)
            for number, entry in enumerate(event.extra_keys)
            if entry
        }
        return {number: keys for number, keys in found.items() if keys != wire.NO_KEYS}

    def _group(self, event: Stored) -> Group:
        kind = _kind(event)
        size = event.block_size
        if kind != "full" and size:  # the index counts a window in blocks of its own, which are the full groups'
            size = max(size, self.index.replicas[self.name].block_size)
        return Group(event.group_idx or 0, kind, size, event.kv_cache_spec_sliding_window or 0)

    def _remove(self, event: Removed) -> Iterator[None]:
        for at in range(0, len(event.block_hashes), SLICE_HASHES):
            self.index.remove(
                self.name,
                event.block_hashes[at : at + SLICE_HASHES],
                tier=_tier(event.medium),
                group=event.group_idx or 0,
                now=self._now(),
            )
            yield


def _kind(event: Stored) -> Literal["full", "window", "state"]:
    kind = _KINDS.get(event.kv_cache_spec_kind or "", "full")
    return "state" if kind == "window" and not event.kv_cache_spec_sliding_window else kind


def _tier(medium: str | None) -> str:
    """vLLM says GPU on every device."""
    return GPU if medium is None or medium == GPU else CPU if medium == CPU else STORAGE
