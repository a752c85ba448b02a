"""pytest tests/llm/test_template.py: templates behave as in Hugging Face's tokenizers."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from llm.template import ChatTemplate, TemplateFault

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]


def rendered(source: str, messages: Any = TALK, **more: Any) -> str:
    return ChatTemplate(source).render(messages, **more)


def test_whitespace_around_blocks() -> None:
    assert rendered("{% for m in messages %}\n  {% if true %}\n  {{ m.role }}\n  {% endif %}\n{% endfor %}\n") == (
        "  user\n  assistant\n"
    )


def test_json_keeps_order_letters_and_angle_brackets() -> None:
    assert rendered("{{ x | tojson }}", kwargs={"x": {"b": "<ü>", "a": [1, None]}}) == '{"b": "<ü>", "a": [1, null]}'
    assert rendered("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 2,\n "b": 1\n}'


def test_its_functions() -> None:
    now = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2026, 2, 3))
    assert now.render(TALK) == "03 Feb 2026"
    with pytest.raises(TemplateFault, match="roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")


def test_loop_controls_and_generation() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert rendered(source) == "a"


def test_nothing_can_be_changed_or_reached() -> None:
    with pytest.raises(TemplateFault, match="SecurityError"):
        rendered("{{ messages.append(1) }}")
    with pytest.raises(TemplateFault, match="SecurityError"):
        rendered("{{ messages.__class__.__base__.__subclasses__() }}")


@pytest.mark.parametrize("source", ["{% for %}", "{{ 'open }}", "{% unknown %}"])
def test_what_is_no_template(source: str) -> None:
    with pytest.raises(TemplateFault, match="line 1"):
        ChatTemplate(source)


@pytest.mark.parametrize("source", ["{{ missing.field }}", "{{ 1 / 0 }}", "{{ messages[9].content }}", "{{ 'a' + 1 }}"])
def test_what_fails_while_rendering(source: str) -> None:
    with pytest.raises(TemplateFault):
        rendered(source)


def test_variables() -> None:
    source = "{{ bos_token }}{{ x is defined }}{{ padding is defined }}{{ tools is none }}"
    given = {"x": 1, "unused": 2, "padding": True}
    assert rendered(source, special_tokens={"bos_token": "<s>"}, kwargs=given) == "<s>TrueFalseTrue"
    assert rendered(source, special_tokens={"bos_token": "<s>"}, kwargs={"bos_token": "!"}) == "!FalseFalseTrue"
    with pytest.raises(TemplateFault, match="uses itself"):
        rendered(source, kwargs={"messages": []})


CHATML = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"


def test_continuing_the_final_message() -> None:
    assert rendered(CHATML, continue_final_message=True) == "[user]a[end][assistant]b "
    trimmed = CHATML.replace("m.content", "m.content | trim")
    assert rendered(trimmed, continue_final_message=True) == "[user]a[end][assistant]b"
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}]
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}!{% endfor %}{% endfor %}"
    assert rendered(source, parts, continue_final_message=True) == "x!y"
    assert parts[0]["content"][1] == {"type": "text", "text": "y"}, "the caller's message is changed"


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("{{ messages[0].content }}", TALK),
        ("{{ messages | length }}", TALK),
        (CHATML, [{"role": "user", "content": []}]),
        (CHATML, [{"role": "user", "content": None}]),
    ],
)
def test_what_cannot_be_continued(source: str, messages: Any) -> None:
    with pytest.raises(TemplateFault, match="final message"):
        rendered(source, messages, continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "string"),
        ("{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% for p in m['content'] | list %}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% for p in m.other %}{% endfor %}{% endfor %}", "string"),
        ("{% set rest = messages[1:] %}{% for m in rest %}{% for p in m.content %}{% endfor %}{% endfor %}", "openai"),
        (
            "{% set a = messages %}{% set b = a %}{% set a = b %}"
            "{% for m in b %}{% for p in m.content %}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% for m in messages %}{% set content = m.content %}{% for p in content %}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% macro f(c) %}{% for p in c %}{% endfor %}{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}",
            "openai",
        ),
        (
            "{% macro f(c) %}{% for p in c %}{% endfor %}{% endmacro %}{% for m in messages %}{{ f(c=m.content) }}{% endfor %}",
            "openai",
        ),
        (
            "{% macro f(c) %}{% for p in c %}{% endfor %}{% endmacro %}{% for m in messages %}{{ f(m.x) }}{% endfor %}",
            "string",
        ),
        ("{% macro f(content) %}{% for p in content %}{% endfor %}{% endmacro %}{{ messages }}", "string"),
        (
            "{% set a, b = messages, 1 %}{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% for k, v in messages %}{% endfor %}{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}",
            "string",
        ),
        ("{% for c in content %}{% endfor %}", "openai"),
    ],
)
def test_the_form_of_content(source: str, form: str) -> None:
    assert ChatTemplate(source).content_format == form
