"""The bytes of tokens, and the text that a tokenizer's tokens join to: read off tokenizer.json, then tried on samples.

A prompt can be matched by bytes when its tokens' bytes, joined, are known from its text alone. Byte-level BPE leaves the text
as it is; others rewrite it first in ways that can be repeated here (NFC, a space in front), and what cannot be repeated
(case folding, compatibility forms, dropped spaces, tokens for unknown text) leaves the tokenizer to be matched by tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unicodedata import is_normalized

from tokenizers import AddedToken, Tokenizer, normalizers

MOST_IDS = 16_000_000  # of any model; a table of what a broken file says could take all memory
_SPACE = "▁"  # SentencePiece's sign for a space
# Unicode's White_Space, which is what the tokenizers library strips; Python's own class has four more
_WHITE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_IN_UTF8 = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}  # the others occur in no text
_IDENTITY_PRE = frozenset(("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts", "Sequence"))


class NotByBytes(Exception):
    """Why a tokenizer has to be matched by tokens: a few words."""


@dataclass(frozen=True, slots=True)
class Structure:
    """What tokenizer.json says of bytes.

    byte_level: tokens are spelled in GPT-2's alphabet of 256 characters; else in SentencePiece's, with <0xNN> for bytes.
    nfc: text is brought into NFC. prefix: a space is put in front of each stretch of text between added tokens ("always"),
    of the first ("first"), of none ("never"). doubled: also where the stretch begins with a space already. dropped: bytes
    that have no token and vanish, as some rare control characters do in SmolLM2.
    """

    byte_level: bool
    nfc: bool
    prefix: str
    doubled: bool
    dropped: bytes = b""

    @property
    def rewrites(self) -> bool:
        return self.nfc or self.prefix != "never"


def structure(document: dict[str, Any]) -> Structure:
    """Of a parsed tokenizer.json. Raises NotByBytes."""
    model = document.get("model") or {}
    kind = model.get("type") or ("BPE" if "merges" in model else "")
    if kind not in ("BPE", "Unigram"):
        raise NotByBytes(f"its model is {kind or 'of an unnamed kind'}, which has tokens for unknown text")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise NotByBytes("its tokens carry marks of where a word begins or ends")
    vocabulary = model.get("vocab") or {}
    tokens = set(vocabulary) if isinstance(vocabulary, dict) else {entry[0] for entry in vocabulary}
    pre, normal = _parts(document, "pre_tokenizer"), _parts(document, "normalizer")
    byte_level = any(part["type"] == "ByteLevel" for part in (*pre, *normal))
    if byte_level:
        lacking = bytes(sorted(byte for token, byte in ALPHABET.items() if token not in tokens and byte in _IN_UTF8))
        if lacking and model.get("unk_token") is not None:
            raise NotByBytes("its vocabulary has no token for some bytes")
    elif not model.get("byte_fallback"):
        raise NotByBytes("it has tokens for unknown text")
    else:
        lacking = b""
        if not tokens.issuperset(f"<0x{byte:02X}>" for byte in _IN_UTF8):
            raise NotByBytes("its vocabulary has no token for some bytes")
    nfc, prefix, doubled = _normalised(normal, byte_level)
    for part in pre:
        if part["type"] not in _IDENTITY_PRE or str(part.get("behavior", "")).lower() == "removed":
            raise NotByBytes(f"its {part['type']} pre-tokenizer may drop text")
        if part["type"] == "Metaspace":
            if part.get("replacement", _SPACE) != _SPACE:
                raise NotByBytes("its sign for a space is unusual")
            scheme = part.get("prepend_scheme") or ("always" if part.get("add_prefix_space", True) else "never")
            prefix = prefix if scheme == "never" else scheme
        elif part["type"] == "ByteLevel" and part.get("add_prefix_space"):
            prefix = "always"
    return Structure(byte_level, nfc, prefix, doubled, lacking)


def _normalised(parts: Sequence[dict[str, Any]], byte_level: bool) -> tuple[bool, str, bool]:
    nfc, prefix, doubled = False, "never", False
    for part in parts:
        kind = part["type"]
        if kind == "NFC":
            nfc = True
        elif kind == "Prepend" and part.get("prepend") == _SPACE and not byte_level:
            prefix, doubled = "always", True
        elif kind == "Replace" and part.get("pattern") == {"String": " "} and part.get("content") == _SPACE:
            if byte_level:
                raise NotByBytes("it mixes two alphabets")
        elif kind != "ByteLevel":
            raise NotByBytes(f"its {kind} normaliser rewrites text")
    return nfc, prefix, doubled


def _parts(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The steps of one stage, nested sequences unfolded."""
    found: list[dict[str, Any]] = []
    pending = [document.get(name)]
    while pending:
        part = pending.pop(0)
        if isinstance(part, dict) and part.get("type") == "Sequence":
            pending = [*(part.get("pretokenizers") or part.get("normalizers") or ()), *pending]
        elif isinstance(part, dict):
            found.append(part)
    return found


def _alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 stands for itself, the other bytes for characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


ALPHABET = _alphabet()
_TRANSLATE = {ord(character): chr(byte) for character, byte in ALPHABET.items()}


def byte_table(tokenizer: Tokenizer, byte_level: bool) -> list[bytes]:
    """The bytes of each id, b"" for ids that are no token. Added tokens are their own text. Raises ValueError."""
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    if size > MOST_IDS:
        raise ValueError(f"a token has the id {size - 1}, and no model has so many")
    table = [b""] * size
    for token, number in vocabulary.items():
        if number in added:
            table[number] = added[number].content.encode(errors="replace")
        elif byte_level:
            table[number] = _from_alphabet(token)
        elif byte := _BYTE_TOKEN.fullmatch(token):
            table[number] = bytes((int(byte[1], 16),))
        else:
            table[number] = token.replace(_SPACE, " ").encode(errors="replace")
    return table


def _from_alphabet(token: str) -> bytes:
    try:
        return token.translate(_TRANSLATE).encode("latin-1")
    except UnicodeEncodeError:  # not of the alphabet: a token that was added to the vocabulary as it is
        return token.encode(errors="replace")


Speller = Callable[[str], str]


def speller(tokenizer: Tokenizer, built: Structure) -> Speller:
    """What the tokens of a text join to, as text. Raises NotByBytes where an added token depends on what is around it."""
    added = list(tokenizer.get_added_tokens_decoder().values())
    for token in added:
        if token.lstrip or token.single_word:
            raise NotByBytes(f"the added token {token.content!r} depends on the text before it")
        if token.normalized and (built.prefix != "never" or (built.nfc and not is_normalized("NFC", token.content))):
            raise NotByBytes(f"the added token {token.content!r} is rewritten itself")
    trimming = any(token.rstrip for token in added)
    if not built.rewrites and not trimming:
        return _same if built.byte_level else _spaced
    space = _same if built.byte_level else _spaced
    stretches = _Stretches([token for token in added if not (token.normalized and built.rewrites)])
    normal = normalizers.NFC()

    def spell(text: str) -> str:
        if not trimming and built.prefix == "never" and (text.isascii() or is_normalized("NFC", text)):
            return space(text)
        return "".join(rewritten(text))

    def rewritten(text: str) -> Iterator[str]:
        for begins, is_token, stretch in stretches(text):
            if is_token or not stretch:
                yield stretch
                continue
            spelled = space(normal.normalize_str(stretch) if built.nfc else stretch)
            wanted = built.prefix == "always" or (built.prefix == "first" and begins)
            yield " " + spelled if wanted and (built.doubled or not spelled.startswith(" ")) else spelled

    return spell


def _same(text: str) -> str:
    return text


def _spaced(text: str) -> str:
    return text.replace(_SPACE, " ")


class _Stretches:
    """Cuts a text at added tokens: of two at one place the longer. Each stretch comes as (whether the text begins with it,
    whether it is a token, what it stands for)."""

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        trimming = {token.content for token in tokens if token.rstrip}
        self._words = {token.content for token in tokens}
        words = sorted(self._words, key=lambda word: (-len(word), word))
        parts = [re.escape(word) + (f"[{_WHITE}]*" if word in trimming else "") for word in words]
        self._cut = re.compile("|".join(parts)) if parts else None

    def __call__(self, text: str) -> Iterator[tuple[bool, bool, str]]:
        at = 0
        for found in self._cut.finditer(text) if self._cut is not None else ():
            yield at == 0, False, text[at : found.start()]
            word = found[0]
            yield False, True, word if word in self._words else word.rstrip(_STRIPPED)
            at = found.end()
        yield at == 0, False, text[at:]


_STRIPPED = "".join(filter(re.compile(f"[{_WHITE}]").match, map(chr, range(0x3001))))
