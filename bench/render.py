"""python -m bench render: CPU of making a prompt out of a request, with the embedded model's template and tokenizer.

Rendering and spelling are on the request path, in the event loop's thread; tokens are made in a worker. Every request is an
object of its own with text of its own, and is measured once, after a few others of its kind.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import environment
from bench.index import cpu_us, percentile
from llm.model import Model, open_model
from llm.prompt import Prompt
from server.engines.local import embedded_model

OUT = Path("docs/results/render.json")
WARM = 5
AIM = {"small chat": 100.0}  # µs for rendering and spelling, median


@dataclass(frozen=True, slots=True)
class Row:
    """CPU of the thread in µs."""

    case: str
    prompts: int
    prompt_bytes: int
    tokens: int
    render_p50_us: float
    render_p99_us: float
    spell_p50_us: float
    tokenise_p50_us: float
    aim_us: float | None

    @property
    def verdict(self) -> str:
        if self.aim_us is None:
            return "none"
        return "pass" if self.render_p50_us + self.spell_p50_us <= self.aim_us else "fail"


def words(count: int, seed: str) -> str:
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 9))) for _ in range(count))


def turns(count: int, length: int, seed: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": words(length, f"{seed} {n}")} for n in range(count)]


def system(seed: str) -> dict[str, Any]:
    return {"role": "system", "content": words(20, f"system {seed}")}


def blocks(seed: str) -> dict[str, Any]:
    """A Messages request as agents send them: system blocks, tools, a tool's result."""
    tool = {"name": "search", "description": words(30, "tool"), "input_schema": {"type": "object", "properties": {}}}
    use = {"type": "tool_use", "id": "t", "name": "search", "input": {"q": words(3, seed)}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": words(200, seed)}]}
    return {
        "system": [{"type": "text", "text": words(300, "system"), "cache_control": {"type": "ephemeral"}}],
        "tools": [tool] * 10,
        "messages": [
            *turns(1, 20, seed),
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
    }


CASES: dict[str, tuple[str, int, Callable[[str], dict[str, Any]]]] = {
    "small chat": ("/v1/chat/completions", 400, lambda seed: {"messages": [system(seed), *turns(1, 20, seed)]}),
    "20 turns": ("/v1/chat/completions", 200, lambda seed: {"messages": [system(seed), *turns(20, 60, seed)]}),
    "100 turns": ("/v1/chat/completions", 60, lambda seed: {"messages": [system(seed), *turns(99, 200, seed)]}),
    "one long message": ("/v1/chat/completions", 30, lambda seed: {"messages": turns(1, 20_000, seed)}),
    "messages with tools": ("/v1/messages", 200, blocks),
    "completion": ("/v1/completions", 200, lambda seed: {"prompt": words(500, seed)}),
}


def measure(model: Model, case: str, count: int) -> Row:
    route, _, body = CASES[case]
    bodies = [body(f"{case} {n}") for n in range(count + WARM)]
    prompts: list[Prompt] = []
    lengths: list[tuple[int, int]] = []

    def render(asked: dict[str, Any]) -> None:
        made = model.render(route, asked)
        assert isinstance(made, tuple), made
        prompts.append(made[0])

    gc.collect()
    gc.freeze()
    rendering = [cpu_us(lambda asked=asked: render(asked)) for asked in bodies][WARM:]  # type: ignore[misc]
    spelling = [cpu_us(lambda prompt=prompt: model.spelled(prompt)) for prompt in prompts][WARM:]  # type: ignore[misc]
    tokenising = [cpu_us(lambda prompt=prompt: model.tokens(prompt)) for prompt in prompts][WARM:]  # type: ignore[misc]
    for prompt in prompts[WARM:]:
        pieces = model.spelled(prompt)
        lengths.append((sum(len(piece) for piece in pieces if isinstance(piece, bytes)), len(model.tokens(prompt))))
    return Row(
        case,
        count,
        round(sum(length for length, _ in lengths) / count),
        round(sum(tokens for _, tokens in lengths) / count),
        round(percentile(rendering, 50), 1),
        round(percentile(rendering, 99), 1),
        round(percentile(spelling, 50), 1),
        round(percentile(tokenising, 50), 1),
        AIM.get(case),
    )


def markdown(rows: Sequence[Row], where: dict[str, object]) -> str:
    lines = [
        "# Making the prompt: CPU on the request path",
        "",
        f"Measured {where['date']} at commit `{where['commit']}`"
        + (" with uncommitted changes" if where["dirty"] else "")
        + f", {where['cpu']}, Python {where['python']}. Made by `python -m bench render`.",
        "",
        "SmolLM2-135M-Instruct's template and tokenizer. Rendering makes the prompt's text out of the parsed request, spelling",
        "its bytes for the index; tokens are made in a worker, off the path. CPU of the thread in µs.",
        "",
        "| request | measured | prompt, bytes | tokens | render p50 | p99 | spell p50 | tokenise p50 | aim p50 | |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {row.case} | {row.prompts} | {row.prompt_bytes:,} | {row.tokens:,} | {row.render_p50_us} "
            f"| {row.render_p99_us} | {row.spell_p50_us} | {row.tokenise_p50_us:,.0f} "
            f"| {'' if row.aim_us is None else f'{row.aim_us:.0f}'} | {row.verdict} |"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parse = argparse.ArgumentParser(prog="python -m bench render", description=__doc__.splitlines()[0])
    parse.add_argument("--quick", action="store_true", help="a tenth of the requests, nothing written")
    parse.add_argument("--out", type=Path, default=OUT, help="JSON file; the Markdown page lies beside it as .md")
    given = parse.parse_args(arguments)
    model = open_model(embedded_model(os.environ))
    rows = []
    for case, (_, count, _) in CASES.items():
        rows.append(measure(model, case, max(4, count // (10 if given.quick else 1))))
        print(rows[-1], rows[-1].verdict, file=sys.stderr, flush=True)
    page = given.out.with_suffix(".md")
    where: dict[str, object] = {
        "commit": environment.commit(),
        "dirty": environment.dirty([given.out, page]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": environment.cpu_model(),
        "python": platform.python_version(),
    }
    if not given.quick:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        result = {
            "schema": 1,
            "suite": "render",
            "environment": where,
            "rows": [asdict(row) | {"verdict": row.verdict} for row in rows],
        }
        given.out.write_text(json.dumps(result, indent=1) + "\n")
        page.write_text(markdown(rows, where))
    print(markdown(rows, where))
    return 0 if all(row.verdict != "fail" for row in rows) else 1
