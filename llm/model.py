"""Everything that is known of a model's prompts, from its folder: what a request becomes, its bytes, its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm.check import token_ids
from llm.folder import ModelFolder, open_folder
from llm.prompt import Media, Prompt, Unrendered
from llm.renderer import DEFAULT_OPTIONS, EngineOptions, Renderer
from llm.tokenizer import ModelTokenizer, open_tokenizer


@dataclass(frozen=True, slots=True)
class Model:
    """`render` and `spelled` are for the request path; `tokens` is for a worker thread."""

    folder: ModelFolder
    tokenizer: ModelTokenizer
    renderer: Renderer

    @property
    def by_bytes(self) -> bool:
        """Whether prompts may be matched by bytes; else by tokens, and `tokenizer.why_not` says why."""
        return self.tokenizer.by_bytes

    def render(self, route: str, body: Mapping[str, Any]) -> tuple[Prompt, ...] | Unrendered:
        """The prompts of a request, or a reason."""
        return self.renderer.render(route, body)

    def spelled(self, prompt: Prompt) -> list[bytes | Media]:
        """What the prompt is matched by: the bytes that its tokens join to, cut where media lie. Only where `by_bytes`."""
        if prompt.text is None:
            return [b"".join(self.tokenizer.token_bytes(prompt.ids or ()))]
        if not prompt.media:
            return [self.tokenizer.spell(prompt.text, prompt.add_special_tokens)]
        before, after = (self.tokenizer.before, self.tokenizer.after) if prompt.add_special_tokens else (b"", b"")
        pieces: list[bytes | Media] = []
        at = 0
        for media in prompt.media:
            pieces += [before + self.tokenizer.spell(prompt.text[at : media.start], False), media]
            at, before = media.end, b""
        return [*pieces, self.tokenizer.spell(prompt.text[at:], False) + after]

    def tokens(self, prompt: Prompt) -> Sequence[int]:
        """The prompt's ids; media stay the one placeholder that the template prints."""
        return token_ids(self.tokenizer, prompt)


def open_model(path: Path, options: EngineOptions = DEFAULT_OPTIONS) -> Model:
    """Reads a folder with config.json and tokenizer.json: some 0.1 s. Raises UsageError or SetupError."""
    folder = open_folder(path)
    tokenizer = open_tokenizer(folder)
    dressing = len(tokenizer.prefix) + len(tokenizer.suffix)
    return Model(folder, tokenizer, Renderer(folder, options, dressing))
