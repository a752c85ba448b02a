"""pytest tests/bench/test_render.py: a kind of request is rendered and measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.render import markdown, measure
from llm.model import open_model
from tests.llm.cases import TEMPLATES
from tests.llm.toys import write_folder


@pytest.mark.parametrize("case", ["small chat", "messages with tools", "completion"])
def test_a_case_is_measured(case: str, tmp_path: Path) -> None:
    row = measure(open_model(write_folder(tmp_path, chat_template_jinja=TEMPLATES["tools"])), case, 2)
    assert row.prompts == 2
    assert row.prompt_bytes >= row.tokens > 50
    assert row.render_p99_us >= row.render_p50_us > 0
    where: dict[str, object] = {"date": "d", "commit": "c", "dirty": True, "cpu": "x", "python": "3"}
    assert f"| {case} | 2 |" in markdown([row], where)
