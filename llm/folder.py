"""What a model's folder says of prompts: its chat templates, its special tokens, and whether vLLM renders it by other means.

The rules are those of vLLM 0.32 with transformers 5, which is what reads the same folder in the engine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvgate.errors import SetupError, UsageError
from llm.template import ChatTemplate, TemplateFault

# named special tokens that a template sees, besides the model's own names that end in _token
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# what tokenizer classes assume where the folder names no token; a class that is not here may assume anything
_ASSUMED: dict[str, dict[str, str]] = {
    "PreTrainedTokenizer": {},
    "TokenizersBackend": {},
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
}
# architectures for which vLLM 0.32 renders chats in code of its own, not by a template
_OWN_RENDERER = frozenset(
    (
        "KimiK3ForConditionalGeneration",
        "DeepseekV32ForCausalLM",
        "DeepseekV4ForCausalLM",
        "DeepseekV4ForConditionalGeneration",
        "DeepseekV41ForCausalLM",
        "InklingForCausalLM",
        "InklingForConditionalGeneration",
        "GptOssForCausalLM",
    )
)
_MEDIA_CONFIGS = (
    "vision_config",
    "audio_config",
    "vision_tower",
    "mm_vision_tower",
    "image_token_id",
    "audio_token_id",
)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model's folder, read once.

    config: config.json. tokenizer_config: tokenizer_config.json, or {}. templates: the tokenizer's, by name; "default" is
    the one without a name. processor_template: the multimodal processor's, which vLLM prefers where no tools are given.
    special_tokens: what templates see as bos_token and so on. unknown_tokens: names that this folder leaves to a tokenizer
    class which kvgate does not know.
    """

    path: Path
    config: dict[str, Any]
    tokenizer_config: dict[str, Any]
    templates: dict[str, ChatTemplate]
    processor_template: ChatTemplate | None
    special_tokens: dict[str, str]
    unknown_tokens: frozenset[str] = field(default=frozenset())

    @property
    def tokenizer_file(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def own_renderer(self) -> bool:
        """Whether vLLM renders this model's chats by code of its own."""
        names = self.config.get("architectures") or ()
        return (
            not _OWN_RENDERER.isdisjoint(names) or self.config.get("model_type") == "gpt_oss" or _is_mistral(self.path)
        )

    @property
    def takes_media(self) -> bool:
        return any(self.config.get(key) is not None for key in _MEDIA_CONFIGS)

    def template(self, with_tools: bool) -> ChatTemplate | None:
        """The template that vLLM chooses, by whether the request's `tools` are set. None: the model has none."""
        if not with_tools and self.processor_template is not None:
            return self.processor_template
        if with_tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        return self.templates.get("default")


def open_folder(path: Path) -> ModelFolder:
    """Read a model's folder. Raises UsageError where it is none, SetupError that names the file at fault."""
    if not path.is_dir():
        raise UsageError(
            f"{path} is not a folder: name the folder that holds the model's config.json and tokenizer.json"
        )
    for name, what in (("config.json", "the model's shape"), ("tokenizer.json", "its tokenizer")):
        if not (path / name).is_file():
            raise SetupError(f"{path} has no {name}, which says {what}: complete the folder, or name another")
    config = _read(path / "config.json")
    tokenizer_config = _read(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
    sources = _tokenizer_templates(path, tokenizer_config)
    processor = _processor_template(path, sources)
    special, unknown = _special_tokens(path, config, tokenizer_config)
    return ModelFolder(
        path=path,
        config=config,
        tokenizer_config=tokenizer_config,
        templates={name: _compiled(path, name, source) for name, source in sources.items()},
        processor_template=None if processor is None else _compiled(path, "processor's", processor),
        special_tokens=special,
        unknown_tokens=unknown,
    )


def given_template(text: str) -> ChatTemplate:
    """What the engine's --chat-template names: a file, or the template itself. Raises UsageError."""
    if any(c in text for c in "{}\n"):
        source = text
    else:
        try:
            source = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the chat template {text} cannot be read ({error}): name the engine's file") from error
    try:
        return ChatTemplate(source)
    except TemplateFault as fault:
        raise UsageError(f"the chat template given is no Jinja template: {fault}") from fault


def _compiled(path: Path, name: str, source: str) -> ChatTemplate:
    try:
        return ChatTemplate(source)
    except TemplateFault as fault:
        raise SetupError(f"{path}: the {name} chat template is no Jinja template: {fault}") from fault


def _read(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise SetupError(f"{file} cannot be read as JSON ({error}): fetch it anew") from error
    if not isinstance(value, dict):
        raise SetupError(f"{file} is no JSON object: fetch it anew")
    return value


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{file} cannot be read ({error}): fetch it anew") from error


def _tokenizer_templates(path: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """By name. Files of their own win over what tokenizer_config.json holds."""
    found = {file.stem: _text(file) for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    if (path / "chat_template.jinja").is_file():
        found["default"] = _text(path / "chat_template.jinja")
    if found:
        return found
    given = tokenizer_config.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list):
        given = {item["name"]: item["template"] for item in given if isinstance(item, dict) and len(item) >= 2}
    if isinstance(given, dict) and all(isinstance(source, str) for source in given.values()):
        return given
    if given is None:
        return {}
    raise SetupError(f"{path / 'tokenizer_config.json'}: chat_template is neither text nor a list of named templates")


def _processor_template(path: Path, tokenizer: dict[str, str]) -> str | None:
    """The template of a multimodal processor. One that only has the tokenizer's files is no template of its own."""
    if not ((path / "processor_config.json").is_file() or (path / "preprocessor_config.json").is_file()):
        return None
    if (path / "processor_config.json").is_file():
        own = _read(path / "processor_config.json").get("chat_template")
        if isinstance(own, str):
            return own
    if (path / "chat_template.json").is_file():  # an older form, which only processors read
        legacy = _read(path / "chat_template.json").get("chat_template")
        return legacy if isinstance(legacy, str) else None
    return tokenizer.get("default") if (path / "chat_template.jinja").is_file() else None


def _special_tokens(
    path: Path, config: dict[str, Any], tokenizer_config: dict[str, Any]
) -> tuple[dict[str, str], frozenset[str]]:
    """What the folder names, and which names it leaves to a class that is not known here."""
    given = dict(tokenizer_config)
    legacy = path / "special_tokens_map.json"
    if "added_tokens_decoder" not in tokenizer_config and legacy.is_file():
        given |= _read(legacy)
    name = str(given.get("tokenizer_class") or config.get("tokenizer_class") or "TokenizersBackend")
    name = name.removesuffix("Fast")
    assumed = _ASSUMED.get(name)
    named = [*_NAMED, *(key for key in given if key.endswith("_token") and key not in _NAMED)]
    extra = given.get("extra_special_tokens")
    found = {} if assumed is None else dict(assumed)
    for key, value in [*((key, given[key]) for key in named if key in given), *_items(extra)]:
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[key] = text
        elif text is None:
            found.pop(key, None)
    unknown = () if assumed is not None else [key for key in _NAMED if key not in given]
    return found, frozenset(unknown)


def _items(value: object) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _is_mistral(path: Path) -> bool:
    """Whether vLLM takes mistral-common's tokenizer: it does where the repository has the files of both."""
    return any(path.glob("consolidated*.safetensors")) and (
        (path / "tekken.json").is_file() or any(path.glob("tokenizer.model.v*"))
    )
