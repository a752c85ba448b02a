"""Small tokenizers of the kinds that served models have, and model folders around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from llm.spelling import ALPHABET

SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>")
MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("l", "l"), ("o", "r"), ("Ċ", "Ċ"), ("Ã", "¼"), ("1", "2")]


def byte_level(*, bos: bool = False, prefix_space: bool = False, normalizer: Any = None) -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it."""
    merged = ["".join(pair) for pair in MERGES]
    made = Tokenizer(models.BPE({token: n for n, token in enumerate([*ALPHABET, *merged])}, MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    return _dressed(made, bos)


def sentencepiece(*, bos: bool = False, scheme: str | None = "first", legacy: bool = False) -> Tokenizer:
    """As Llama 2, Mistral and Gemma have it: "▁" for spaces, bytes for what has no token."""
    letters = [chr(code) for code in range(0x21, 0x7F)] + ["ü", "▁"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("l", "l"), ("▁", "▁")]
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *("".join(m) for m in merges)]
    made = Tokenizer(
        models.BPE(
            {token: n for n, token in enumerate(tokens)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    if legacy:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif scheme is not None:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    else:
        made.normalizer = normalizers.Replace(" ", "▁")
    return _dressed(made, bos)


def unigram() -> Tokenizer:
    """As T5 has it: what has no token is unknown."""
    scores = [("<unk>", 0.0), ("▁", -2.0), ("a", -3.0), ("▁a", -2.5), ("b", -3.0)]
    made = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    return _dressed(made, False)


def _dressed(made: Tokenizer, bos: bool) -> Tokenizer:
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
    return made


def write_folder(path: Path, made: Tokenizer | None = None, **files: Any) -> Path:
    """A model's folder. `files`: more of them or others, by name with _ for a dot; text as it is, the rest as JSON."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text((made or byte_level()).to_str())
    settings = {"bos_token": "<s>", "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    written: dict[str, Any] = {"config_json": {"model_type": "llama"}, "tokenizer_config_json": settings} | files
    for name, content in written.items():
        stem, _, ending = name.rpartition("_")
        (path / f"{stem}.{ending}").write_text(content if isinstance(content, str) else json.dumps(content))
    return path
