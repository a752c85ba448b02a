"""A model's tokenizer: text to token ids as the engine makes them, and token ids to the bytes that prompts are matched by.

Loads tokenizer.json alone; no transformers, no torch. Where the folder's class builds its tokenizer by rules of its own, ids
may differ from the engine's, which `llm.check` finds out; the bytes of a token do not depend on that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import tokenizers
from tokenizers import AddedToken

from kvgate.errors import SetupError
from llm.folder import ModelFolder
from llm.spelling import NotByBytes, Speller, byte_table, speller, structure

# every one of these has to come back byte for byte, or the tokenizer is matched by tokens
SAMPLES = (
    "The quick brown fox, 12345.678 times!",
    " leading and trailing ",
    "  two  spaces\n\n\nlines\r\n\ttabs\t\x0b\x0c",
    "Ünïcödé, naïve façade; ǅ ß ſ ﬁ ２½ Ⅳ",
    "e\u0301 cafe\u0301 \u1e9b\u0323 \u212b \uac00 \u1100\u1161",
    "漢字かな交じり文。한국어 ไทย עברית العربية हिन्दी",
    "👩🏽\u200d🚀 🇩🇪 ☃️ 𝔘𝔫𝔦 \U0010fffd",
    "▁ ▁▁x <0x41> <unk> <s> </s> Ġ Ċ ĉ",
    "\x00\x01\x04\x13\x1c\x7f\x85\xa0\u200b\u2028\u3000\ufeff\ufffd",
    "def f(x):\n    return {'a': [1, 2]}  # ``code``\n",
)


class ModelTokenizer:
    """`by_bytes`: prompts may be matched by bytes; else by tokens, and `why_not` says why in a few words.

    prefix, suffix: the ids that special tokens add around a text where a request asks for them; before, after: their bytes.
    """

    def __init__(self, document: bytes, added: Sequence[AddedToken] = (), special_as_text: bool = False) -> None:
        """`document`: tokenizer.json. `added`: tokens that only the rest of the folder names. Raises ValueError."""
        try:
            parsed = orjson.loads(document)
            self._tokenizer = tokenizers.Tokenizer.from_str(document.decode())
        except Exception as error:  # the library raises Exception itself
            raise ValueError(str(error)) from error
        known = self._tokenizer.get_vocab(with_added_tokens=True)
        self._tokenizer.add_tokens([token for token in added if token.content not in known])
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = special_as_text
        self.why_not = ""
        self._spell: Speller = str
        self._dropped = b""
        byte_level = "Ġ" in known or "Ā" in known
        try:
            if special_as_text:
                raise NotByBytes("it takes special tokens for text")
            built = structure(parsed)
            byte_level, self._dropped = built.byte_level, built.dropped
            self._spell = speller(self._tokenizer, built)
        except NotByBytes as reason:
            self.why_not = str(reason)
        self._bytes = byte_table(self._tokenizer, byte_level)
        self.prefix, self.suffix = self._around()
        self.before, self.after = (b"".join(self.token_bytes(ids)) for ids in (self.prefix, self.suffix))
        if not self.why_not:
            self.why_not = self._differs()

    @property
    def by_bytes(self) -> bool:
        return not self.why_not

    @property
    def size(self) -> int:
        """Ids, added tokens and gaps included."""
        return len(self._bytes)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids. Takes 1 ms for some 2,000 tokens, and 110 bytes of memory for each byte: for a worker thread."""
        # a batch of one: the library's `encode` holds the interpreter's lock, and with it the event loop, until it is done
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """Of each token; b"" for an id that the tokenizer does not know."""
        table, size = self._bytes, len(self._bytes)
        return [table[number] if 0 <= number < size else b"" for number in ids]

    def spell(self, text: str, add_special_tokens: bool) -> bytes:
        """The bytes that the tokens of this text join to. Only where `by_bytes`."""
        spelled = self._spell(text).encode()
        if self._dropped:
            spelled = spelled.translate(None, self._dropped)
        return self.before + spelled + self.after if add_special_tokens else spelled

    def spelled_token(self, number: int) -> str:
        """For people: what a token stands for, and its id."""
        return f"{number} {self.token_bytes((number,))[0].decode(errors='backslashreplace')!r}"

    def _around(self) -> tuple[list[int], list[int]]:
        bare, dressed = self.encode("a", False), self.encode("a", True)
        more = len(dressed) - len(bare)
        at = next((n for n in range(more + 1) if dressed[n : n + len(bare)] == bare), 0)
        return dressed[:at], dressed[at + len(bare) :]

    def _differs(self) -> str:
        """Why samples do not come back; empty if all do."""
        words = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()][:64]
        samples = [*SAMPLES, *(f"a {word} b{word}\n{word}{word}" for word in words), "".join(SAMPLES)]
        for sample in samples:
            for special in (False, True):
                if b"".join(self.token_bytes(self.encode(sample, special))) != self.spell(sample, special):
                    return f"the tokens of {sample[:20]!r} do not join to its bytes"
        return ""


class BytesPerToken:
    """Learns how long tokens are, from prompts of known length; the last hundred or so count most."""

    def __init__(self, first_guess: float = 4.0) -> None:
        self._bytes, self._tokens = first_guess, 1.0

    def learn(self, length: int, tokens: int) -> None:
        """A prompt of `length` bytes had so many tokens."""
        self._bytes, self._tokens = 0.99 * self._bytes + length, 0.99 * self._tokens + tokens

    @property
    def ratio(self) -> float:
        """Bytes per token."""
        return self._bytes / self._tokens

    def tokens(self, length: int) -> int:
        """About how many tokens so many bytes are; at least 1."""
        return max(1, round(length / self.ratio))


def open_tokenizer(folder: ModelFolder) -> ModelTokenizer:
    """The folder's tokenizer, with the added tokens that only tokenizer_config.json names. Raises SetupError."""
    file = folder.tokenizer_file
    special_as_text = folder.tokenizer_config.get("split_special_tokens") is True
    try:
        return ModelTokenizer(file.read_bytes(), _added(folder), special_as_text)
    except (OSError, ValueError) as error:
        raise SetupError(f"{file} is no tokenizer that can be read ({error}): fetch it anew") from error


def _added(folder: ModelFolder) -> list[AddedToken]:
    """In the order in which transformers adds them: by id, then the named special tokens, then the unnamed ones."""
    given: dict[str, Any] = folder.tokenizer_config.get("added_tokens_decoder") or {}
    tokens = [AddedToken(**entry) for _, entry in sorted(given.items(), key=lambda item: int(item[0]))]
    named = [AddedToken(text, special=True) for text in folder.special_tokens.values()]
    extra = folder.tokenizer_config.get("extra_special_tokens")
    if extra is None:
        extra = folder.tokenizer_config.get("additional_special_tokens")
    unnamed = [
        AddedToken(text, special=True) for text in map(_content, extra if isinstance(extra, list) else ()) if text
    ]
    return [*tokens, *named, *unnamed]


def _content(token: object) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
