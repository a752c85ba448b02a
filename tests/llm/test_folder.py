"""pytest tests/llm/test_folder.py: which template vLLM takes from a folder, and what is said of broken ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvgate.errors import SetupError, UsageError
from llm.folder import ModelFolder, given_template, open_folder
from tests.llm.toys import write_folder


def opened(path: Path, **files: Any) -> ModelFolder:
    return open_folder(write_folder(path, **files))


def source(folder: ModelFolder, with_tools: bool = False) -> str | None:
    template = folder.template(with_tools)
    return None if template is None else template.source


def test_no_template(tmp_path: Path) -> None:
    assert source(opened(tmp_path)) is None


def test_one_of_the_tokenizer_config(tmp_path: Path) -> None:
    folder = opened(tmp_path, tokenizer_config_json={"chat_template": "one"})
    assert source(folder) == source(folder, True) == "one"


def test_a_file_wins(tmp_path: Path) -> None:
    folder = opened(tmp_path, tokenizer_config_json={"chat_template": "one"}, chat_template_jinja="two")
    assert source(folder) == "two"


NAMED = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]


def test_named_templates(tmp_path: Path) -> None:
    folder = opened(tmp_path, tokenizer_config_json={"chat_template": NAMED})
    assert (source(folder), source(folder, True)) == ("d", "t")
    folder = opened(tmp_path, tokenizer_config_json={"chat_template": NAMED[:1]})
    assert (source(folder), source(folder, True)) == ("d", "d")
    folder = opened(tmp_path, tokenizer_config_json={"chat_template": NAMED[1:]})
    assert (source(folder), source(folder, True)) == (None, "t")


def test_named_files(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    folder = opened(tmp_path, chat_template_jinja="d")
    assert (source(folder), source(folder, True)) == ("d", "t")


def test_a_processors_template_is_for_requests_without_tools(tmp_path: Path) -> None:
    folder = opened(
        tmp_path,
        preprocessor_config_json={},
        chat_template_json={"chat_template": "p"},
        tokenizer_config_json={"chat_template": "d"},
    )
    assert (source(folder), source(folder, True)) == ("p", "d")


def test_special_tokens(tmp_path: Path) -> None:
    settings = {
        "tokenizer_class": "LlamaTokenizerFast",
        "eos_token": {"content": "<end>"},
        "unk_token": None,
        "image_token": "<image>",
        "extra_special_tokens": {"boi_token": "<boi>"},
        "add_bos_token": True,
    }
    folder = opened(tmp_path, tokenizer_config_json=settings, special_tokens_map_json={"pad_token": "<pad>"})
    assert folder.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "<end>",
        "pad_token": "<pad>",
        "image_token": "<image>",
        "boi_token": "<boi>",
    }
    assert not folder.unknown_tokens
    folder = opened(tmp_path, tokenizer_config_json=settings | {"added_tokens_decoder": {}})
    assert "pad_token" not in folder.special_tokens, "the older file is not read where the newer form is there"


def test_a_class_that_is_not_known_leaves_tokens_unknown(tmp_path: Path) -> None:
    folder = opened(tmp_path, tokenizer_config_json={"tokenizer_class": "OddTokenizer", "eos_token": "<end>"})
    assert "bos_token" in folder.unknown_tokens
    assert "eos_token" not in folder.unknown_tokens


@pytest.mark.parametrize(
    ("config", "own"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, False),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, True),
        ({"model_type": "gpt_oss"}, True),
        ({}, False),
    ],
)
def test_models_that_vllm_renders_itself(tmp_path: Path, config: dict[str, Any], own: bool) -> None:
    assert opened(tmp_path, config_json=config).own_renderer is own


def test_mistrals_own_files(tmp_path: Path) -> None:
    (tmp_path / "consolidated.safetensors").touch()
    assert not opened(tmp_path).own_renderer
    (tmp_path / "tekken.json").touch()
    assert opened(tmp_path).own_renderer


def test_faults_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        open_folder(tmp_path / "nowhere")
    with pytest.raises(SetupError, match=r"no config\.json"):
        open_folder(tmp_path)
    with pytest.raises(SetupError, match=r"config\.json cannot be read as JSON"):
        opened(tmp_path, config_json="{")
    with pytest.raises(SetupError, match=r"tokenizer_config\.json is no JSON object"):
        opened(tmp_path, tokenizer_config_json="[]")
    with pytest.raises(SetupError, match="neither text nor a list"):
        opened(tmp_path, tokenizer_config_json={"chat_template": 5})
    with pytest.raises(SetupError, match="default chat template is no Jinja template: line 1"):
        opened(tmp_path, chat_template_jinja="{% if %}")


def test_a_template_given_to_the_engine(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    assert given_template(str(file)).source == given_template("{{ messages }}").source
    with pytest.raises(UsageError, match="cannot be read"):
        given_template(str(tmp_path / "none.jinja"))
    with pytest.raises(UsageError, match="no Jinja template"):
        given_template("{% if %}")
