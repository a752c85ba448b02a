"""pytest tests/llm/test_renderer.py: prompts are those that vLLM's own code makes, recorded in vllm-0.32-prompts.json.

Record anew, with the engine's Python: python -m tests.llm.test_renderer
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from llm.folder import open_folder
from llm.prompt import REASONS, Prompt, Unrendered
from llm.renderer import EngineOptions, Renderer
from server.engines.local import engine_python
from tests.llm.cases import (
    ALL,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    TEMPLATES,
    chat,
    message,
    response,
    text,
    user,
)
from tests.llm.toys import write_folder

RECORD = Path(__file__).with_name("vllm-0.32-prompts.json")
SAYS = Path(__file__).with_name("vllm_says.py")
# what vLLM renders and this does not, on purpose: truncation that may cut, calls without an id
LEFT = {"truncated"}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def vllm_says() -> dict[str, list[str | None]]:
    """Fresh from vLLM's code, in the engine's environment."""
    cases = json.dumps({"templates": TEMPLATES, "requests": ALL})
    done = subprocess.run(
        [engine_python(os.environ), "-I", str(SAYS)],
        input=cases,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    said: dict[str, list[str | None]] = json.loads(done.stdout)
    return said


def recorded() -> dict[str, list[str | None]]:
    said: dict[str, list[str | None]] = json.loads(RECORD.read_text())
    return said


def renderer(path: Path, options: EngineOptions = EngineOptions(), **files: Any) -> Renderer:  # noqa: B008 - frozen
    return Renderer(open_folder(write_folder(path, **files)), options)


def only(made: tuple[Prompt, ...] | Unrendered) -> Prompt:
    assert not isinstance(made, Unrendered), made
    (prompt,) = made
    return prompt


def reason(made: tuple[Prompt, ...] | Unrendered) -> str:
    assert isinstance(made, Unrendered), made
    assert made.reason in REASONS
    return made.reason


def test_the_record_is_of_these_requests() -> None:
    said = recorded()
    assert said.keys() == TEMPLATES.keys()
    assert {len(texts) for texts in said.values()} == {len(ALL)}


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_vllms(name: str, tmp_path: Path) -> None:
    """Every prompt that vLLM makes is the same here or, for a reason of its own, not made; none is another."""
    make = renderer(tmp_path, EngineOptions(chat_template=TEMPLATES[name]), tokenizer_config_json=TOKENS)
    wrong = []
    same = 0
    for (route, body), theirs in zip(ALL, recorded()[name], strict=True):
        before = copy.deepcopy(body)
        made = make.render(route, body)
        assert body == before, "a request is changed"
        if isinstance(made, Unrendered):
            if theirs is not None and made.reason not in LEFT:
                wrong.append((route, body, made, theirs))
        elif theirs is not None:
            if made[0].text != theirs:
                wrong.append((route, body, made[0].text, theirs))
            same += 1
    assert not wrong, "\n".join(map(str, wrong[:3]))
    assert same > 100


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_vllm_refuses_is_seldom_rendered(name: str, tmp_path: Path) -> None:
    """Harmless, since the engine answers with an error; but each would be a prompt that nobody sees."""
    make = renderer(tmp_path, EngineOptions(chat_template=TEMPLATES[name]))
    refused = [case for case, theirs in zip(ALL, recorded()[name], strict=True) if theirs is None]
    made = [case for case in refused if not isinstance(make.render(*case), Unrendered)]
    assert len(made) <= 4, made


DUMP = EngineOptions(chat_template="{{ [messages, tools, x] }}{{ bos_token }}")


def test_salt_and_special_tokens(tmp_path: Path) -> None:
    make = renderer(tmp_path, DUMP)
    prompt = only(make.render(*chat(user("x"), cache_salt="s", add_special_tokens=True)))
    assert (prompt.salt, prompt.add_special_tokens, prompt.ids, prompt.media) == ("s", True, None, ())
    assert not only(make.render(*chat(user("x")))).add_special_tokens
    assert only(make.render(*response("x"))).add_special_tokens, "vLLM adds them for the Responses API"
    assert not only(make.render(*message(user("x"), cache_salt="s"))).add_special_tokens
    assert only(make.render(*message(user("x"), cache_salt="s"))).salt == "s"


def completion(prompt: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": prompt, **more}


def test_completions(tmp_path: Path) -> None:
    make = renderer(tmp_path)
    assert only(make.render(*completion("a b"))) == Prompt("a b", add_special_tokens=True)
    assert only(make.render(*completion("a", add_special_tokens=False, cache_salt="s"))) == Prompt("a", salt="s")
    assert only(make.render(*completion([1, 2]))) == Prompt(None, [1, 2])
    several = make.render(*completion(["a", "b"]))
    assert not isinstance(several, Unrendered)
    assert [prompt.text for prompt in several] == ["a", "b"]
    ids = make.render(*completion([[1], [2, 3]], echo=True))
    assert not isinstance(ids, Unrendered)
    assert [prompt.ids for prompt in ids] == [[1], [2, 3]]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"prompt": ""}, "invalid"),
        ({"prompt": []}, "invalid"),
        ({"prompt": [[]]}, "invalid"),
        ({"prompt": [True]}, "invalid"),
        ({"prompt": [-1]}, "invalid"),
        ({"prompt": ["a", 1]}, "invalid"),
        ({"prompt": None}, "invalid"),
        ({"prompt": "a", "add_special_tokens": "yes"}, "invalid"),
        ({"prompt": "a", "cache_salt": ""}, "invalid"),
        ({"prompt": "\ud800"}, "invalid"),
        ({"prompt": "a", "prompt_embeds": "AA"}, "embeddings"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a" * 11, "truncate_prompt_tokens": 12}, "truncated"),
        ({"prompt": "a", "truncate_prompt_tokens": -1}, "truncated"),
        ({"prompt": [1, 2, 3], "truncate_prompt_tokens": 2}, "truncated"),
        ({"prompt": "a", "kv_transfer_params": {"prompt_token_ids": [1]}}, "tokens_forwarded"),
    ],
)
def test_completions_that_are_not_rendered(body: dict[str, Any], why: str, tmp_path: Path) -> None:
    assert reason(renderer(tmp_path).render(COMPLETIONS, body)) == why


def test_truncation_that_cannot_cut(tmp_path: Path) -> None:
    make = renderer(tmp_path, EngineOptions(chat_template="{{ messages }}", max_model_len=1000))
    assert only(make.render(*completion("a" * 10, truncate_prompt_tokens=12))).text == "a" * 10
    assert only(make.render(*completion("a", truncate_prompt_tokens=-1))).text == "a"
    assert only(make.render(*response("x", truncation="auto"))).text
    assert reason(make.render(*response("x" * 1000, truncation="auto"))) == "truncated"


@pytest.mark.parametrize(
    ("files", "case", "why"),
    [
        ({}, chat(user("x")), "no_template"),
        ({"chat_template_jinja": "t"}, chat(user("x"), chat_template="mine"), "request_template"),
        (
            {"chat_template_jinja": "t"},
            chat(user("x"), chat_template_kwargs={"chat_template": "m"}),
            "request_template",
        ),
        ({"chat_template_jinja": "{{ raise_exception('no') }}"}, chat(user("x")), "template_failed"),
        ({"chat_template_jinja": "t", "config_json": {"model_type": "gpt_oss"}}, chat(user("x")), "own_renderer"),
        (
            {"chat_template_jinja": "{{ bos_token }}", "tokenizer_config_json": {"tokenizer_class": "Odd"}},
            chat(user("x")),
            "special_tokens",
        ),
        ({"chat_template_jinja": "t"}, ("/v1/embeddings", {"input": "x"}), "route"),
        ({"chat_template_jinja": "t"}, response("x", previous_response_id="r"), "stored"),
        ({"chat_template_jinja": "t"}, response([{"type": "web_search_call", "id": "1"}]), "item"),
        ({"chat_template_jinja": "t"}, response("x", tools=[{"type": "web_search"}]), "item"),
        (
            {"chat_template_jinja": "{{ messages }}"},
            chat(user([{"type": "image_url", "image_url": {"url": "u"}}])),
            "media",
        ),
    ],
)
def test_what_is_not_rendered(files: dict[str, Any], case: tuple[str, Any], why: str, tmp_path: Path) -> None:
    assert reason(renderer(tmp_path, **files).render(*case)) == why


def test_the_engines_options(tmp_path: Path) -> None:
    make = renderer(
        tmp_path,
        EngineOptions(
            chat_template="{{ [x, y, messages[0].content] }}{{ tools is none }}",
            content_format="openai",
            template_kwargs={"x": 1, "y": 2},
            drop_tools_when_none=True,
        ),
    )
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = chat(user("a"), tools=tools, tool_choice="none", chat_template_kwargs={"y": 3, "x": None})
    assert only(make.render(*asked)).text == "[1, 3, [{'type': 'text', 'text': 'a'}]]True"
    asked = chat(user("a"), tools=tools, tool_choice="auto")
    assert only(make.render(*asked)).text == "[1, 2, [{'type': 'text', 'text': 'a'}]]False"


def test_tools_choose_the_template(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    make = renderer(tmp_path, tokenizer_config_json={"chat_template": templates})
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert only(make.render(*chat(user("a")))).text == "d"
    assert only(make.render(*chat(user("a"), tools=tools))).text == "t"
    assert only(make.render(*message(user("a"), tools=[]))).text == "t", "an empty list is set, too"


def test_system_messages_inside_a_conversation_move_where_the_template_fails_on_them(tmp_path: Path) -> None:
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    asked = message(user("a"), {"role": "system", "content": "late"}, user("b"), system="early,")
    lenient = strict.replace("{{ raise_exception('no') }}", "")
    assert only(renderer(tmp_path, EngineOptions(chat_template=strict)).render(*asked)).text == (
        "[system]early,late[user]a[user]b"
    )
    assert only(renderer(tmp_path, EngineOptions(chat_template=lenient)).render(*asked)).text == (
        "[system]early,[user]a[system]late[user]b"
    )


def test_disabled_thinking(tmp_path: Path) -> None:
    asked = message(user("a"), thinking={"type": "disabled"})
    source = "{{ reasoning_effort }}{{ enable_thinking }}"
    assert only(renderer(tmp_path, EngineOptions(chat_template=source)).render(*asked)).text == "noneFalse"
    ignoring = "{{ 'max' if reasoning_effort in ('max', 'none') else reasoning_effort }}"
    assert only(renderer(tmp_path, EngineOptions(chat_template=ignoring)).render(*asked)).text == "low"
    told = EngineOptions(chat_template=source, disabled_thinking="high")
    assert only(renderer(tmp_path, told).render(*asked)).text == "highTrue"


VISION = {"config_json": {"vision_config": {}}}
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'image' %}<start><pad><end>{% else %}<{{ p.type }}>{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def picture(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_media_are_opaque_keys_at_their_place(tmp_path: Path) -> None:
    make = renderer(tmp_path, chat_template_jinja=PARTS, **VISION)
    sound = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
    prompt = only(
        make.render(*chat(user([text("see "), picture("a"), picture("b"), text(" and "), sound, picture("a")])))
    )
    assert prompt.text == "<user>see <start><pad><end><start><pad><end> and <audio><start><pad><end>"
    assert [prompt.text[m.start : m.end] for m in prompt.media] == [
        "<start><pad><end>",
        "<start><pad><end>",
        "<audio>",
        "<start><pad><end>",
    ]
    keys = [(media.kind, media.key) for media in prompt.media]
    assert keys[0] == keys[3]
    assert len(set(keys)) == 3
    image = {"type": "image", "source": {"type": "url", "url": "a"}}
    assert only(make.render(*message(user([image])))).media[0].key == keys[0][1], "the same image in another dialect"


def test_media_whose_place_is_not_known(tmp_path: Path) -> None:
    moving = PARTS.replace("{{ p.text }}", "{{ loop.index }}{{ p.text }}")
    make = renderer(tmp_path, chat_template_jinja=moving, **VISION)
    assert reason(make.render(*chat(user([text("a"), picture("b")])))) == "media"
    assert only(make.render(*chat(user([text("a")])))).text == "<user>1a"


def test_half_a_surrogate_pair_is_no_prompt(tmp_path: Path) -> None:
    make = renderer(tmp_path, EngineOptions(chat_template="{{ messages | tojson }}"))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    assert (
        reason(make.render(*chat(user("x"), {"role": "assistant", "content": "", "tool_calls": [call]}))) == "invalid"
    )


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, MESSAGES, RESPONSES, "/tokenize"])
@pytest.mark.parametrize("junk", [None, 1, "x", [1], [[]], [None], {}, {"a": 1}, [{}], [{"role": 1}]])
def test_junk_is_no_fault(route: str, junk: Any, tmp_path: Path) -> None:
    make = renderer(tmp_path, chat_template_jinja="{{ messages }}", **VISION)
    for field in (
        "messages",
        "input",
        "tools",
        "system",
        "chat_template_kwargs",
        "documents",
        "instructions",
        "reasoning",
    ):
        make.render(route, {field: junk})
        make.render(route, {"messages": [user("x")], "input": "x", field: junk})
        make.render(route, {"messages": [user(junk), {"role": "assistant", "content": junk, "tool_calls": junk}]})
        parts = [{"type": kind, "text": junk, "content": junk} for kind in ("text", "tool_result")]
        make.render(route, {"messages": [user(parts)]})
        odd = [text("x"), {"type": junk}]
        make.render(route, {"system": odd, "messages": [user(odd)]})
        make.render(route, {"input": [{"type": "reasoning", "summary": [], "content": junk}, {"type": junk}]})


if __name__ == "__main__":
    RECORD.write_text(json.dumps(vllm_says(), ensure_ascii=False, indent=0) + "\n")
