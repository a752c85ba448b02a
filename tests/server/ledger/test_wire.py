"""What vLLM 0.30 to 0.33 publish is understood, and nothing else does harm."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.ledger import wire
from server.ledger.wire import BrokenFrame, Cleared, Keys, Removed, Stored
from tests.server.ledger.publisher import CLEARED, Event, as_array, batch, removed, stored

TOKENS = list(range(8))


def decoded(payload: bytes) -> list[wire.Event | None]:
    return [wire.event(raw) for raw in wire.batch(payload)]


@pytest.mark.parametrize(
    "event",
    [
        stored(TOKENS),
        stored(TOKENS, first=1),
        stored(TOKENS, salt="s", group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=128),
        stored(TOKENS, block_hashes=[b"\x01" * 32, b"\x02" * 32], parent_block_hash=b"\x03" * 32),
        removed(TOKENS, 0, 1),
        removed(TOKENS, 1, medium="CPU", group_idx=2),
        CLEARED,
    ],
    ids=lambda event: str(event["type"]),
)
def test_maps_and_arrays_say_the_same(event: Event) -> None:
    (a,), (b,) = decoded(batch(event)), decoded(batch(as_array(event)))
    assert a is not None
    assert b is not None
    fields = type(a).__struct_fields__
    assert [getattr(a, name) for name in fields] == [getattr(b, name) for name in fields]
    assert {name: getattr(a, name) for name in fields if name in event} == {
        name: value for name, value in event.items() if name in fields
    }


# What vLLM 0.32's own KVEventBatch encodes to
VLLM_032 = bytes.fromhex(
    "93cb3ff8000000000000958da474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657393cfffffffffffff"
    "ffff0102b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647396000102030405aa626c6f636b5f73697a"
    "6502a76c6f72615f696403a66d656469756da3475055a96c6f72615f6e616d65a57374796c65aa65787472615f6b65797393"
    "93a57374796c6592a3636174fea173c091c4020102a967726f75705f69647801b26b765f63616368655f737065635f6b696e"
    "64ae736c6964696e675f77696e646f77bc6b765f63616368655f737065635f736c6964696e675f77696e646f77cc80aa7365"
    "7373696f6e5f6964a17889a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c420070707070707"
    "0707070707070707070707070707070707070707070707070707b1706172656e745f626c6f636b5f68617368c42008080808"
    "08080808080808080808080808080808080808080808080808080808a9746f6b656e5f69647390aa626c6f636b5f73697a65"
    "00a76c6f72615f6964c0a66d656469756da3435055a96c6f72615f6e616d65c0a86c6f63616c697479a54c4f43414c84a474"
    "797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739101a66d656469756da3475055a967726f75705f69"
    "64780083a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c420070707070707070707070707"
    "0707070707070707070707070707070707070707a66d656469756da753544f5241474581a474797065b0416c6c426c6f636b"
    "73436c656172656401"
)


def test_what_vllm_032_publishes() -> None:
    window, offloaded, gone, evicted, cleared = decoded(VLLM_032)
    assert isinstance(window, Stored)
    assert (window.block_hashes, window.parent_block_hash) == ([2**64 - 1, 1, 2], None)
    assert (window.token_ids, window.block_size, window.medium) == ([0, 1, 2, 3, 4, 5], 2, "GPU")
    assert (window.lora_name, window.lora_id, window.group_idx) == ("style", 3, 1)
    assert (window.kv_cache_spec_kind, window.kv_cache_spec_sliding_window) == ("sliding_window", 128)
    assert window.extra_keys is not None
    assert [wire.keys(entry, "style", n == 0) for n, entry in enumerate(window.extra_keys)] == [
        Keys("s", (("cat", -2),)),
        Keys(),
        Keys(embeds=("0102",)),
    ]
    assert isinstance(offloaded, Stored)
    assert (offloaded.block_hashes, offloaded.token_ids, offloaded.medium) == ([b"\x07" * 32], [], "CPU")
    assert isinstance(gone, Removed)
    assert (gone.block_hashes, gone.group_idx) == ([1], 0)
    assert isinstance(evicted, Removed)
    assert (evicted.block_hashes, evicted.medium) == ([b"\x07" * 32], "STORAGE")
    assert isinstance(cleared, Cleared)


def test_what_is_unknown_is_passed_over() -> None:
    found = decoded(
        batch(
            {"type": "BlockMoved", "block_hashes": 7, "to": {"x": [1, None]}},
            ["BlockMoved", [1], {"a": 1}],
            stored(TOKENS, locality="LOCAL", session_id="s", colour="green"),
            [*as_array(removed(TOKENS, 0, group_idx=0)), "LOCAL", None, 3.5],
            ["AllBlocksCleared", "why"],
        )
    )
    assert found[:2] == [None, None]
    assert isinstance(found[2], Stored)
    assert isinstance(found[3], Removed)
    assert isinstance(found[4], Cleared)


def test_a_batch_may_lack_its_rank_and_have_more() -> None:
    assert len(wire.batch(batch(CLEARED, rank=None))) == 1
    assert len(wire.batch(msgspec.msgpack.encode([1.5, [CLEARED], None, "more", {}]))) == 1
    assert len(wire.batch(msgspec.msgpack.encode({"ts": 1, "events": [CLEARED], "data_parallel_rank": 3}))) == 1


def test_numbers() -> None:
    number = (7).to_bytes(8, "big")
    assert wire.numbered([b"topic", number, b"x"]) == (7, b"x")
    assert wire.numbered([b"", b"topic", number, b"x"]) == (7, b"x")
    assert wire.numbered([b"", number, b"x"]) == (7, b"x")
    for end in ([b"", b"", wire.END, b""], [b"", wire.END, b""], [b"", b""]):
        assert wire.numbered(end) is None
    for broken in ([], [b"x"], [b"", b"7", b"x"], [b"", wire.END, b"x"], [b"", b"", b"x"]):
        with pytest.raises(BrokenFrame):
            wire.numbered(broken)


@pytest.mark.parametrize(
    ("entry", "lora", "first", "keys"),
    [
        (None, None, True, Keys()),
        ([], None, True, Keys()),
        (["salt"], None, True, Keys("salt")),
        (["style"], "style", True, Keys()),
        (["style", "salt"], "style", True, Keys("salt")),
        (["style", "style"], "style", True, Keys("style")),  # a salt may be spelled like an adapter
        (["style"], "style", False, Keys()),
        ([["cat", -3], ["dog", 5], "salt"], None, True, Keys("salt", (("cat", -3), ("dog", 5)))),
        ([b"\x01\xff"], None, False, Keys(embeds=("01ff",))),
        (["later"], None, False, Keys(embeds=("later",))),  # no salt behind the first block
        ([["lora", "style", "/path"], ["mm", "cat", 2], ["cache_salt", "s"]], "style", True, Keys("s", (("cat", 2),))),
        ([["prompt_embeds", b"\x02"]], None, True, Keys(embeds=("02",))),
        ([7, "salt"], None, True, Keys("salt")),
    ],
)
def test_extra_keys(entry: list[Any] | None, lora: str | None, first: bool, keys: Keys) -> None:
    assert wire.keys(entry, lora, first) == keys


@pytest.mark.parametrize("entry", [[1.5], [["cat"]], [{"a": 1}], [[1, 2]], ["salt", 3]])
def test_extra_keys_of_no_known_form(entry: list[Any]) -> None:
    with pytest.raises(BrokenFrame):
        wire.keys(entry, None, True)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)
wild_events = st.one_of(
    values,
    st.builds(
        lambda event, changes: {**event, **changes},
        st.sampled_from([stored(TOKENS), removed(TOKENS, 0), CLEARED]),
        st.dictionaries(
            st.sampled_from(["type", "block_hashes", "token_ids", "extra_keys", "block_size"]), values, max_size=2
        ),
    ),
    st.builds(
        lambda event, at, value: [value if i == at else item for i, item in enumerate(as_array(event))],
        st.sampled_from([stored(TOKENS, salt="s"), removed(TOKENS, 0)]),
        st.integers(0, 9),
        values,
    ),
)


def read_all(payload: bytes) -> int:
    """How many events it understands; BrokenFrame is the only way out."""
    understood = 0
    try:
        raws = wire.batch(payload)
    except BrokenFrame:
        return 0
    for raw in raws:
        try:
            event = wire.event(raw)
            if isinstance(event, Stored):
                for entry in event.extra_keys or ():
                    wire.keys(entry, event.lora_name, True)
        except BrokenFrame:
            continue
        understood += event is not None
    return understood


@given(st.binary(max_size=60))
@example(b"")
@example(b"\x93")
@example(b"\xdd\xff\xff\xff\xff")  # an array that says it has four billion items
@example(b"\x93\x00\xdd\xff\xff\xff\xff\xc0")
@example(b"\xdf\xff\xff\xff\xff\xa1x")
@example(b"\x92\x00\x91\xc6\xff\xff\xff\xff")
@example(b"\x91" * 100_000)  # nested without end
@example(b"\x92\x00\x91" + b"\x91" * 100_000)
@example(b"\x81\xa6events" + b"\x81\xa1a" * 50_000)
@example(b"\x92\x00\x91\x81\xa4type\xa4\xff\xfe\xfd\xfc")  # text that is no UTF-8
def test_no_bytes_raise_out(payload: bytes) -> None:
    read_all(payload)


@given(st.lists(wild_events, max_size=5), st.data())
def test_no_events_raise_out(events: list[Any], data: st.DataObject) -> None:
    payload = bytearray(batch(*events, stored(TOKENS)))
    assert read_all(bytes(payload)) >= 1
    for _ in range(data.draw(st.integers(0, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    read_all(bytes(payload[: data.draw(st.integers(0, len(payload)))]))
