"""pytest tests/loadtest/sim/test_language.py: the toy tokenizer, and what is written with a tokenizer."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvgate.errors import SetupError, UsageError
from llm.prompt import Prompt
from loadtest.sim.asks import Refused
from loadtest.sim.hashing import TOKEN
from loadtest.sim.text import WORDS, Words, Writer
from loadtest.sim.tokens import Language
from loadtest.sim.toy import EOS, ToyCoder

TOY = ToyCoder()
WRITTEN = Language.toy().words


def encode(text: str) -> list[int]:
    return TOY.encode(text, specials=True)


@given(st.text())
def test_the_bytes_of_toy_tokens_are_the_text(text: str) -> None:
    ids = encode(text)
    assert b"".join(map(TOY.token_bytes, ids)) == text.encode()
    assert TOY.decode(ids) == text
    assert all(0 <= one < TOY.vocabulary and one != EOS for one in ids)


@given(st.text(), st.text())
def test_a_prefix_of_text_is_a_prefix_of_toy_tokens_but_for_the_last(head: str, tail: str) -> None:
    ids = encode(head)
    assert encode(head + tail)[: max(0, len(ids) - 1)] == ids[:-1]


def test_toy_tokens_begin_at_words_and_lines() -> None:
    assert TOY.pieces(encode("The cat, however <|im_end|>\nSits")) == [
        *("The", " cat", ",", " how", "ever", " ", "<|im", "_end", "|>", "\n", "Sits")
    ]


def test_what_is_written_is_tokenised_again_as_it_was_written() -> None:
    language = Language.toy()
    prompt = array(TOKEN, encode("<|im_start|>assistant\n"))
    writer = Writer(language.words, prompt)
    tokens = [writer.next() for _ in range(200)]
    text = "".join(writer.text(number, token) or "" for number, token in enumerate(tokens))
    assert encode("<|im_start|>assistant\n" + text + "<|im_end|>\n")[len(prompt) :][:200] == tokens
    assert len(set(tokens)) > 50


def test_the_same_prompt_gives_the_same_answer_and_a_variant_another() -> None:
    language, prompt = Language.toy(), array(TOKEN, range(50))
    answers = []
    for variant in (0, 0, 1):
        writer = Writer(language.words, prompt, variant=variant)
        answers.append([writer.next() for _ in range(20)])
    assert answers[0] == answers[1] != answers[2]


def test_an_answer_follows_its_script_and_ends_where_it_is_told() -> None:
    writer = Writer(Language.toy().words, array(TOKEN, [1]), eos=7, script=[100, 200])
    writer.length = 3
    answer = [writer.next() for _ in range(4)]
    assert answer[:2] == [100, 200]
    assert answer[3] == 7


@given(st.integers(1, 1000), st.lists(st.integers(0, 9), min_size=1))
def test_a_natural_length_is_between_one_and_twice_the_mean(mean: int, prompt: list[int]) -> None:
    assert 1 <= Writer(WRITTEN, array(TOKEN, prompt)).natural_length(mean) <= max(1, 2 * mean - 1)


def model_folder(folder: Path, words: list[str]) -> Path:
    vocabulary = {word: number for number, word in enumerate(["<|end|>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
    settings = {"eos_token": {"content": "<|end|>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    return folder


def chat(language: Language, text: str) -> Prompt:
    return language.prompt("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})


def test_a_model_folder_gives_tokenizer_template_and_context(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, ["▁The", *(f"▁{word}" for word in WORDS)])
    language = Language.of_folder(folder)
    assert language.max_model_len == 512
    assert language.coder.eos == 0
    prompt = chat(language, "The dog")
    assert (prompt.text, prompt.add_special_tokens) == ("The dog<|end|>", False)
    ids = language.coder.encode("The dog<|end|>", specials=False)
    assert (ids[0], ids[-1]) == (2, 0)
    assert language.coder.pieces(ids[:2]) == [" The", " dog"]
    (tmp_path / "chat_template.jinja").write_text("other")
    assert chat(Language.of_folder(folder), "The dog").text == "other"


def test_what_the_model_cannot_read_is_refused(tmp_path: Path) -> None:
    language = Language.of_folder(model_folder(tmp_path, ["▁The", "▁dog"]))
    with pytest.raises(Refused, match="cannot render this request: invalid"):
        language.prompt("/v1/chat/completions", {"messages": []})


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json is no tokenizer"),
        ("config.json", "{", "config.json cannot be read as JSON"),
        ("config.json", "[]", "config.json is no JSON object"),
        ("chat_template.jinja", "{% for", "chat template is no Jinja template"),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused_by_file(
    tmp_path: Path, name: str, content: str | None, said: str
) -> None:
    folder = model_folder(tmp_path, ["▁The", "▁dog"])
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(SetupError, match=said):
        Language.of_folder(folder)


def test_a_tokenizer_without_short_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no token for any short English word"):
        Language.of_folder(model_folder(tmp_path, ["▁Uno"]))


def test_words_are_found_alone_and_after_another() -> None:
    words = Words.find(encode, TOY.decode)
    assert len(words.first) == 8
    assert len(words.others) == len(WORDS)
    assert TOY.decode(list(words.first)[:1]) == next(iter(words.first.values()))
