"""How a simulated model reads and writes: a model folder's tokenizer and chat template, or the toy tokenizer and ChatML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kvgate.errors import UsageError
from llm.folder import ModelFolder, open_folder
from llm.prompt import Prompt, Unrendered
from llm.renderer import EngineOptions, Renderer
from llm.template import ChatTemplate
from llm.tokenizer import ModelTokenizer, open_tokenizer
from loadtest.sim.asks import Refused
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
    """The tokenizer of a model folder."""

    def __init__(self, tokenizer: ModelTokenizer, eos_text: str | None) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = tokenizer.size
        ids = tokenizer.encode(eos_text, False) if eos_text else []
        self.eos = ids[0] if len(ids) == 1 else 0

    def encode(self, text: str, *, specials: bool) -> list[int]:
        return self._tokenizer.encode(text, specials)

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self._tokenizer.token_bytes(tokens)).decode(errors="replace")

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return [spelled.decode(errors="replace") for spelled in self._tokenizer.token_bytes(tokens)]


class Language:
    """How a model reads and writes. max_model_len: tokens that its configuration allows, or None."""

    def __init__(self, folder: ModelFolder, coder: Coder) -> None:
        self.coder = coder
        self.words = Words.find(lambda text: coder.encode(text, specials=False), coder.decode)
        self.max_model_len: int | None = folder.config.get("max_position_embeddings")
        self._renderer = Renderer(folder, EngineOptions())

    @classmethod
    def toy(cls) -> Language:
        template = ChatTemplate(CHATML)
        return cls(ModelFolder(Path(), {}, {}, {"default": template}, None, {"eos_token": "<|im_end|>"}), ToyCoder())

    @classmethod
    def of_folder(cls, path: Path) -> Language:
        """Raises UsageError or SetupError that name the file at fault."""
        folder = open_folder(path)
        coder = FolderCoder(open_tokenizer(folder), folder.special_tokens.get("eos_token"))
        try:
            return cls(folder, coder)
        except ValueError as error:
            raise UsageError(f"--model {path}: {error}") from error

    def prompt(self, route: str, body: Mapping[str, Any]) -> Prompt:
        """The one prompt that a chat or a /tokenize body asks for. Raises Refused."""
        made = self._renderer.render(route, body)
        if isinstance(made, Unrendered):
            raise Refused(400, f"The simulated engine cannot render this request: {made.reason}")
        if made[0].media:
            raise Refused(400, "The simulated engine reads text only")
        return made[0]
