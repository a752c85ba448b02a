"""pytest tests/llm/test_tokenizer.py: what tokens join to, and which tokenizers cannot be matched by bytes."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from kvgate.errors import SetupError
from llm.folder import open_folder
from llm.tokenizer import BytesPerToken, ModelTokenizer, open_tokenizer
from tests.llm import toys

BY_BYTES = {
    "byte level": toys.byte_level(),
    "byte level, BOS": toys.byte_level(bos=True),
    "byte level, space in front": toys.byte_level(prefix_space=True),
    "byte level, NFC": toys.byte_level(normalizer=normalizers.NFC()),
    "byte level, NFC in a sequence": toys.byte_level(bos=True, normalizer=normalizers.Sequence([normalizers.NFC()])),
    "SentencePiece, first": toys.sentencepiece(bos=True, scheme="first"),
    "SentencePiece, always": toys.sentencepiece(scheme="always"),
    "SentencePiece, never": toys.sentencepiece(scheme="never"),
    "SentencePiece, legacy": toys.sentencepiece(bos=True, legacy=True),
    "SentencePiece, Gemma": toys.sentencepiece(scheme=None),
}
PIECES = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [*toys.SPECIAL, " ", "  ", "\n", "▁", "e\u0301", "the", "ü", "u\u0308", "<0x41>", "\U0001f680", "1212"]
    ),
)
TEXTS = (
    st.lists(PIECES, max_size=8)
    .map("".join)
    .filter(lambda text: text.isascii() or text.encode(errors="ignore").decode() == text)
)


def opened(made: Tokenizer) -> ModelTokenizer:
    return ModelTokenizer(made.to_str().encode())


LOADED = {name: opened(made) for name, made in BY_BYTES.items()}


@pytest.mark.parametrize("name", BY_BYTES)
def test_these_are_matched_by_bytes(name: str) -> None:
    assert LOADED[name].why_not == ""
    assert LOADED[name].by_bytes


@pytest.mark.parametrize("name", BY_BYTES)
@given(text=TEXTS, special=st.booleans())
@settings(max_examples=60)
def test_tokens_join_to_the_spelled_text(name: str, text: str, special: bool) -> None:
    tokenizer = LOADED[name]
    ids = tokenizer.encode(text, special)
    assert b"".join(tokenizer.token_bytes(ids)) == tokenizer.spell(text, special)


@given(text=TEXTS)
@settings(max_examples=60)
def test_byte_level_leaves_text_alone(text: str) -> None:
    assert LOADED["byte level"].spell(text, True) == text.encode()
    assert LOADED["byte level, BOS"].spell(text, True) == b"<s>" + text.encode()
    assert LOADED["byte level, BOS"].spell(text, False) == text.encode()


@given(text=TEXTS)
@settings(max_examples=60)
def test_ids_are_those_of_the_library(text: str) -> None:
    made = BY_BYTES["byte level, BOS"]
    assert LOADED["byte level, BOS"].encode(text, True) == made.encode(text).ids


def test_others_run_while_a_long_text_is_encoded() -> None:
    began, over = threading.Event(), threading.Event()

    def encode() -> None:
        began.set()
        LOADED["byte level"].encode("the other " * 50_000, False)
        over.set()

    thread, turns = threading.Thread(target=encode), 0
    thread.start()
    began.wait()
    while not over.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 5  # at most two where the interpreter's lock is held


def spelled(name: str, text: str) -> str:
    return LOADED[name].spell(text, True).decode()


def test_what_is_put_in_front() -> None:
    assert spelled("SentencePiece, legacy", "a b<|im_end|> c") == "<s> a b<|im_end|>  c"
    assert spelled("SentencePiece, first", "a b<|im_end|> c") == "<s> a b<|im_end|> c"
    assert spelled("SentencePiece, always", "a<|im_end|>b") == " a<|im_end|> b"
    assert spelled("SentencePiece, always", " a") == " a"
    assert spelled("byte level, space in front", "a<|im_end|>b") == " a<|im_end|> b"
    assert spelled("SentencePiece, Gemma", "a▁b") == "a b"
    assert spelled("byte level, NFC", "e\u0301<|im_end|>e\u0301") == "é<|im_end|>é"


def test_nfc_does_not_reach_over_an_added_token() -> None:
    tokenizer = LOADED["byte level, NFC"]
    text = "a<|im_end|>\u0338b"  # which would compose with the > before it
    assert (
        b"".join(tokenizer.token_bytes(tokenizer.encode(text, False))) == tokenizer.spell(text, False) == text.encode()
    )


def with_token(**flags: bool) -> Tokenizer:
    made = toys.byte_level()
    made.add_tokens([AddedToken("<t>", **flags)])
    return made


def test_a_token_that_swallows_what_follows() -> None:
    tokenizer = opened(with_token(rstrip=True, normalized=False))
    assert tokenizer.by_bytes
    assert tokenizer.spell("a <t> \n\u3000b<t>", False) == b"a <t>b<t>"


def word_piece() -> Tokenizer:
    return Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))


def dropping() -> Tokenizer:
    made = toys.byte_level()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s+"), behavior="removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return made


def lacking(unknown: str | None) -> Tokenizer:
    made = Tokenizer(models.BPE({"a": 0, "b": 1, "?": 2}, [], unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (toys.unigram(), "unknown text"),
        (word_piece(), "unknown text"),
        (toys.byte_level(normalizer=normalizers.Lowercase()), "Lowercase"),
        (toys.byte_level(normalizer=normalizers.NFKC()), "NFKC"),
        (dropping(), "may drop text"),
        (lacking("?"), "no token for some bytes"),
        (with_token(lstrip=True), "depends on the text before"),
        (with_token(single_word=True), "depends on the text before"),
    ],
)
def test_these_are_matched_by_tokens(made: Tokenizer, reason: str) -> None:
    tokenizer = opened(made)
    assert not tokenizer.by_bytes
    assert reason in tokenizer.why_not


def test_bytes_without_a_token_vanish() -> None:
    tokenizer = opened(lacking(None))
    assert tokenizer.by_bytes
    assert tokenizer.spell("abc? ü", False) == b"ab?"


def test_samples_catch_what_the_structure_does_not_show() -> None:
    made = toys.byte_level()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Split("Ġ", behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    assert "do not join" in opened(made).why_not


def test_bytes_of_tokens() -> None:
    tokenizer = LOADED["SentencePiece, first"]
    made = BY_BYTES["SentencePiece, first"]
    ids = [made.token_to_id(token) for token in ("<0xE2>", "▁the", "<|im_start|>")]
    assert tokenizer.token_bytes([*ids, 10**6, -1]) == [b"\xe2", b" the", b"<|im_start|>", b"", b""]


def test_tokens_of_the_folder_that_the_tokenizer_lacks(tmp_path: Path) -> None:
    settings = {
        "eos_token": {"content": "<end>", "lstrip": False},
        "added_tokens_decoder": {"900": {"content": "<later>", "special": True}},
        "additional_special_tokens": ["<more>", "<s>"],
        "tokenizer_class": "TokenizersBackend",
    }
    tokenizer = open_tokenizer(open_folder(toys.write_folder(tmp_path, tokenizer_config_json=settings)))
    ids = tokenizer.encode("<later><end><more><s>", False)
    assert tokenizer.token_bytes(ids) == [b"<later>", b"<end>", b"<more>", b"<s>"]
    assert tokenizer.by_bytes


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    toys.write_folder(tmp_path, tokenizer_json="{}")
    with pytest.raises(SetupError, match=r"tokenizer\.json is no tokenizer"):
        open_tokenizer(open_folder(tmp_path))


def test_an_id_past_all_reason_takes_no_memory(tmp_path: Path) -> None:
    made = json.loads(toys.byte_level().to_str())
    made["model"]["vocab"]["far"] = 2**32 - 1
    toys.write_folder(tmp_path, tokenizer_json=json.dumps(made))
    with pytest.raises(SetupError, match="has the id 4294967295"):
        open_tokenizer(open_folder(tmp_path))


def test_bytes_per_token_are_learnt() -> None:
    learner = BytesPerToken()
    assert learner.tokens(400) == 100
    for _ in range(500):
        learner.learn(300, 100)
    assert learner.ratio == pytest.approx(3, rel=0.01)
    for _ in range(500):
        learner.learn(600, 100)
    assert learner.ratio == pytest.approx(6, rel=0.01)
    assert learner.tokens(0) == 1
