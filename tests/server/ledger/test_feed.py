"""Events become blocks of the index."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache.copies import CPU, GPU
from kvcache.index import PrefixIndex
from kvcache.spelling import Namespace, opaque, packed
from server.ledger.feed import LOWER_TIERS, SLICE_TOKENS, Feed
from tests.server.ledger.publisher import BLOCK, CLEARED, batch, name_of, removed, stored
from tests.server.ledger.spelling import KNOWN_TOKENS, PLAIN, PackedSpeller

A = list(range(12))  # three blocks
LONG = list(range(5000))


class Fed:
    def __init__(self, blocks: int = 10_000) -> None:
        self.index = PrefixIndex()
        self.changes = 0
        self.feed = Feed(self.index, "r", blocks, PackedSpeller(), self._changed)

    def _changed(self) -> None:
        self.changes += 1

    def hear(self, *events: Any) -> int:
        """How often it paused."""
        return sum(1 for _ in self.feed.apply(batch(*events)))

    def routed(self, tokens: list[int], namespace: Namespace = PLAIN) -> int:
        return self.index.match(packed(tokens), namespace).routed("r")

    @property
    def uncertain(self) -> bool:
        return self.index.uncertain("r")


@pytest.fixture
def fed() -> Fed:
    return Fed()


def test_blocks_are_stored_removed_and_cleared(fed: Fed) -> None:
    fed.hear(stored(A))
    assert fed.routed([*A, 99]) == 12
    fed.hear(removed(A, 2))
    assert fed.routed(A) == 8
    fed.hear(stored(A, first=2), removed(A, 0))
    assert fed.routed(A) == 0
    fed.hear(CLEARED, stored(A, first=0))
    assert fed.routed(A) == 12
    assert fed.index.held("r") == 3
    assert fed.changes >= 4
    assert not fed.uncertain


def test_salts_and_adapters_are_kept_apart(fed: Fed) -> None:
    fed.hear(
        stored(A[:8], salt="s"),
        stored(A, first=2, salt="s"),  # a later block's event names no salt
        stored(A[:4], lora_name="style", lora_id=1, extra_keys=[["style"]], block_hashes=[1]),
        stored(A[:8], lora_name="style", lora_id=1, extra_keys=[["style", "s"], ["style"]], block_hashes=[2, 3]),
        stored(A[:4], lora_id=7, block_hashes=[4]),
    )
    assert fed.routed(A) == 0
    assert fed.routed(A, Namespace(salt="s")) == 12
    assert fed.routed(A, Namespace("style")) == 4
    assert fed.routed(A, Namespace("style", "s")) == 8
    assert fed.routed(A, Namespace("#7")) == 4
    assert not fed.uncertain


def test_images_and_embeddings_are_what_their_blocks_are_keyed_by(fed: Fed) -> None:
    pad = 9
    tokens = [1, 2, pad, pad, pad, 3, 4, 5]
    fed.hear(stored(tokens, extra_keys=[[["cat", 2]], [["cat", -2]]]))
    cat, dog = opaque("cat"), opaque("dog")
    head, tail = packed([1, 2]), packed([3, 4, 5])
    match = fed.index.match
    assert match(head + cat * 3 + tail, PLAIN).routed("r") == 8
    assert not match(head + dog * 3 + tail, PLAIN).tokens
    assert not match(packed(tokens), PLAIN).tokens
    fed.hear(stored(A, extra_keys=[None, [b"\x01"], [b"\x02"]]))
    assert fed.routed(A) == 4, "the tokens of an embedding say nothing"


def test_a_big_event_is_applied_in_slices(fed: Fed) -> None:
    pauses = fed.hear(stored(LONG, salt="s"))
    assert pauses >= len(LONG) // SLICE_TOKENS
    assert fed.routed(LONG, Namespace(salt="s")) == 5000
    assert fed.hear(removed(LONG, *range(1, 1250), salt="s")) >= 4
    assert fed.routed(LONG, Namespace(salt="s")) == BLOCK


def test_images_are_found_in_every_slice(fed: Fed) -> None:
    count = len(LONG) // BLOCK
    keys: list[Any] = [None] * count
    keys[1000] = [["cat", 0]]
    fed.hear(stored(LONG, extra_keys=keys))
    assert fed.routed(LONG) == 4000
    with_cat = packed(LONG[:4000]) + opaque("cat") + packed(LONG[4001:])
    assert fed.index.match(with_cat, PLAIN).routed("r") == 5000


def test_tiers_are_counted_apart_and_make_room(fed: Fed) -> None:
    fed.hear(stored(A), stored(A, medium="CPU"), removed(A, 0, 1, 2))
    assert (fed.index.held("r", GPU), fed.index.held("r", CPU)) == (0, 3)
    assert fed.index.tiers(fed.index.match(packed(A), PLAIN), "r") == {CPU: 12}
    assert fed.index.replicas["r"].limit > fed.feed.blocks * LOWER_TIERS
    # placeholders of offloaded blocks carry no tokens: they are found by their hash
    fed.hear(
        {"type": "BlockStored", "block_hashes": [name_of(A[:4])], "token_ids": [], "block_size": 0, "medium": "DISK"}
    )
    fed.hear(removed(A, 0, medium="CPU"))
    assert fed.routed(A) == 12
    assert not fed.uncertain


def window(tokens: list[int], *numbers: int, size: int = BLOCK) -> dict[str, Any]:
    """The window group's event: of a prompt's blocks only those in the window."""
    event = stored(tokens, block_size=size, group_idx=1, kv_cache_spec_kind="sliding_window")
    hashes = [name_of(tokens[: (n + 1) * size]) for n in numbers]
    return event | {"block_hashes": hashes, "kv_cache_spec_sliding_window": 2 * BLOCK + 1}


@pytest.mark.parametrize("first", [True, False])
def test_a_window_s_blocks_bound_the_hit(fed: Fed, first: bool) -> None:
    tokens = list(range(24))
    full = stored(tokens, group_idx=0, kv_cache_spec_kind="full_attention")
    narrow = window(tokens, 2, 3, 4, 5)
    fed.hear(*(narrow, full) if first else (full, narrow))
    assert fed.routed(tokens) == 24
    fed.hear({"type": "BlockRemoved", "block_hashes": [name_of(tokens[:20])], "medium": "GPU", "group_idx": 1})
    assert fed.routed(tokens) == 16, "the window before token 16 is there, that before 20 or 24 is not"
    assert not fed.uncertain


def test_a_window_of_finer_blocks_comes_before_the_full_group(fed: Fed) -> None:
    tokens = list(range(16))
    full = stored(tokens, group_idx=0, kv_cache_spec_kind="full_attention", block_size=8)
    full["block_hashes"] = [name_of(tokens[:8]), name_of(tokens)]
    fed.hear(window(tokens, 0, 1, 2, 3), full)
    assert fed.index.replicas["r"].block_size == 8
    assert fed.routed(tokens) == 16
    assert not fed.uncertain


def test_groups_that_no_prefix_hits_are_left_out(fed: Fed) -> None:
    fed.hear(stored(A, group_idx=1, kv_cache_spec_kind="cross_attention"))
    assert fed.index.held("r") == 0


@pytest.mark.parametrize(
    "broken",
    [
        "no event",
        {"type": "BlockStored"},
        stored(A, token_ids=["x"]),
        stored(A, token_ids=[-1] * 12),
        stored(A, token_ids=[KNOWN_TOKENS] * 12, block_hashes=[1, 2, 3]),
        stored(A, extra_keys=[[1.5], None, None]),
        stored(A, extra_keys=[["s"]]),
        {"type": "BlockRemoved", "block_hashes": "all"},
    ],
)
def test_a_broken_event_makes_uncertain_and_the_others_count(fed: Fed, broken: Any) -> None:
    fed.hear(stored(A[:4]), broken, stored(A, first=1))
    assert fed.routed(A) == 12
    assert fed.uncertain
    assert fed.feed.broken == 1


def test_a_broken_batch_makes_uncertain(fed: Fed) -> None:
    list(fed.feed.apply(b"\xc1"))
    assert fed.uncertain
    fed.hear(CLEARED)
    assert not fed.uncertain


def test_an_uncertain_replica_is_known_again_when_all_its_blocks_were_renewed() -> None:
    fed = Fed(blocks=20)
    fed.hear(stored(A, first=1))  # of a parent nobody told of
    fed.feed.doubt("a test")
    for n in range(19):
        fed.hear(stored([1000 + n] * BLOCK))
        assert fed.uncertain
    fed.hear(stored([2000] * BLOCK))
    assert not fed.uncertain
    fed.feed.doubt("a test")
    fed.hear(stored([3000] * BLOCK))
    assert fed.uncertain, "counted from the last doubt on"
