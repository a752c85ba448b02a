"""How a simulated model reads and writes: a model folder's tokenizer and chat template, or the toy tokenizer and ChatML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from kvgate.errors import UsageError
from loadtest.sim.text import Words
from loadtest.sim.toy import ToyCoder

CHATML = (
    "{%- if tools %}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


class Coder(Protocol):
    """A tokenizer. pieces: the text of each token."""

    vocabulary: int  # ids are below it
    eos: int

    def encode(self, text: str, *, specials: bool) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def pieces(self, tokens: Sequence[int]) -> list[str]: ...


class FolderCoder:
    """tokenizer.json of a model folder."""

    def __init__(self, tokenizer: Tokenizer, eos: int) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos = eos

    def encode(self, text: str, *, specials: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=specials).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_token(token) or "" for token in tokens]


class Template:
    """A chat template, rendered as transformers does: sandboxed, with its filters. Raises jinja2.TemplateError."""

    def __init__(self, source: str, specials: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self._template = environment.from_string(source)
        self._specials = dict(specials)

    def render(self, messages: Sequence[Mapping[str, Any]], **given: Any) -> str:
        return self._template.render(messages=messages, **(self._specials | given))

    def other(self, source: str) -> Template:
        """The same with the template that a request brings."""
        return Template(source, self._specials)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class Language:
    """How a model reads and writes. max_model_len: tokens that its configuration allows, or None."""

    def __init__(self, coder: Coder, template: Template, max_model_len: int | None) -> None:
        self.coder = coder
        self.template = template
        self.words = Words.find(lambda text: coder.encode(text, specials=False), coder.decode)
        self.max_model_len = max_model_len

    @classmethod
    def toy(cls) -> Language:
        return cls(ToyCoder(), Template(CHATML, {"bos_token": "", "eos_token": "<|im_end|>"}), None)

    @classmethod
    def of_folder(cls, folder: Path) -> Language:
        """Raises UsageError that names the file at fault."""
        tokenizer = _read_tokenizer(folder / "tokenizer.json")
        settings, config = _read_json(folder / "tokenizer_config.json"), _read_json(folder / "config.json")
        specials = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in settings.items()
            if name.endswith("_token") and isinstance(token, str | dict)
        }
        coder = FolderCoder(tokenizer, tokenizer.token_to_id(specials.get("eos_token", "")) or 0)
        source = folder / "chat_template.jinja"
        text = _read(source) if source.exists() else settings.get("chat_template")
        if not isinstance(text, str):
            text = CHATML  # a base model without one
        try:
            return cls(coder, Template(text, specials), config.get("max_position_embeddings"))
        except jinja2.TemplateError as error:
            raise UsageError(f"--model {folder}: the chat template cannot be read: {error}") from error
        except ValueError as error:
            raise UsageError(f"--model {folder}: {error}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--model {path.parent}: {path.name} cannot be read ({error.strerror})") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise UsageError(f"--model {path.parent}: {path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"--model {path.parent}: {path.name} is not a JSON object")
    return value


def _read_tokenizer(path: Path) -> Tokenizer:
    text = _read(path)
    try:
        return Tokenizer.from_str(text)
    except Exception as error:
        raise UsageError(f"--model {path.parent}: {path.name} is not a tokenizer: {error}") from error
