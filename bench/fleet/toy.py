"""A model's folder with a byte-level tokenizer that has a token for each word that prompts are made of."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from loadtest.sim.text import FIRST_WORDS, WORDS

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_folder(path: Path) -> Path:
    """The same files each time."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*FIRST_WORDS, " " + " ".join(WORDS)], trainer)
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(made.to_str())
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    settings = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path
