from __future__ import annotations

import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgate.errors import UsageError
from loadtest.plan import Shape, make_plan
from loadtest.planfile import plan_bytes, plan_sha256, read_plan, write_plan
from loadtest.schedule import ClosedLoop, OpenLoop
from loadtest.vocabulary import Vocabulary

SHAPES = st.builds(
    Shape,
    groups=st.integers(1, 4),
    sessions=st.integers(1, 5),
    turns=st.integers(1, 3),
    prefix_tokens=st.integers(1, 70),
    suffix_tokens=st.integers(1, 20),
    output_tokens=st.integers(1, 9),
)


def common(a: list[int], b: list[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


@settings(max_examples=40)
@given(shape=SHAPES, seed=st.integers(0, 2**40), span=st.integers(12, 500))
def test_requests_share_exactly_what_was_planned(shape: Shape, seed: int, span: int) -> None:
    plan = make_plan(
        seed=seed, load=ClosedLoop(1), unloaded=None, loaded=shape, vocabulary=Vocabulary(1000, 1000 + span)
    )
    prompts = {r: plan.prompt(r).tolist() for r in plan.requests}
    assert all(len(ids) == r.prompt_tokens for r, ids in prompts.items())
    assert all(1000 <= i < 1000 + span for ids in prompts.values() for i in ids)
    warmup = plan.warmup("loaded").tolist()
    assert all(common(warmup, ids) == 0 for ids in prompts.values())
    for (a, a_ids), (b, b_ids) in combinations(prompts.items(), 2):
        if a.group != b.group:
            assert common(a_ids, b_ids) == 0
        elif a.session != b.session:
            assert common(a_ids, b_ids) == shape.prefix_tokens
        else:
            assert common(a_ids, b_ids) == min(a.prompt_tokens, b.prompt_tokens), "a turn extends the one before"


def test_a_turn_comes_after_the_one_before_it() -> None:
    plan = make_plan(seed=1, load=ClosedLoop(1), unloaded=None, loaded=Shape(2, 3, 3, 10, 5, 2))
    seen: set[tuple[int, int, int]] = set()
    for r in plan.requests:
        assert r.turn == 0 or (r.group, r.session, r.turn - 1) in seen
        seen.add((r.group, r.session, r.turn))


PROGRAM = """
from loadtest.plan import Shape, make_plan
from loadtest.planfile import plan_sha256
from loadtest.schedule import OpenLoop
print(plan_sha256(make_plan(seed=7, load=OpenLoop("poisson", 5.0), unloaded=Shape(1,3,1,64,8,2), loaded=Shape(2,9,2,64,8,4))))
"""


def test_the_same_seed_gives_the_same_bytes_in_every_process() -> None:
    made = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    here = make_plan(
        seed=7, load=OpenLoop("poisson", 5.0), unloaded=Shape(1, 3, 1, 64, 8, 2), loaded=Shape(2, 9, 2, 64, 8, 4)
    )
    assert made == {plan_sha256(here)}
    other = make_plan(
        seed=8, load=OpenLoop("poisson", 5.0), unloaded=Shape(1, 3, 1, 64, 8, 2), loaded=Shape(2, 9, 2, 64, 8, 4)
    )
    assert plan_sha256(other) not in made


def test_a_plan_is_the_same_after_the_disk(tmp_path: Path) -> None:
    plan = make_plan(seed=7, load=OpenLoop("constant", 5.0), unloaded=None, loaded=Shape(2, 9, 2, 64, 8, 4))
    write_plan(plan, tmp_path / "plan.jsonl")
    again = read_plan(tmp_path / "plan.jsonl")
    assert again == plan
    assert (again.prompt(again.requests[5]) == plan.prompt(plan.requests[5])).all()


def test_a_plan_that_was_cut_or_changed_is_refused(tmp_path: Path) -> None:
    plan = make_plan(seed=7, load=ClosedLoop(2), unloaded=None, loaded=Shape(1, 4, 1, 64, 8, 4))
    path = tmp_path / "plan.jsonl"
    path.write_bytes(b"\n".join(plan_bytes(plan).splitlines()[:-1]))
    with pytest.raises(UsageError, match="plan"):
        read_plan(path)
    path.write_bytes(plan_bytes(plan).replace(b'"seed":7', b'"seed":8'))
    changed = read_plan(path)
    with pytest.raises(UsageError, match="does not expand"):
        changed.prompt(changed.requests[0])
    path.write_bytes(b"{}\n")
    with pytest.raises(UsageError, match="--plan"):
        read_plan(path)


def test_too_narrow_a_vocabulary_is_refused() -> None:
    with pytest.raises(UsageError, match="--vocab"):
        make_plan(
            seed=1, load=ClosedLoop(1), unloaded=None, loaded=Shape(1, 20, 1, 8, 4, 2), vocabulary=Vocabulary(10, 20)
        )
