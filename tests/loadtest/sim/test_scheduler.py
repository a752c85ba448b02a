"""pytest tests/loadtest/sim/test_scheduler.py: steps, preemption and aborts, without a clock."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.sim.blocks import Removed, Stored
from loadtest.sim.cache import KvCache
from loadtest.sim.request import Request
from loadtest.sim.scheduler import Limits, Output, Scheduler

SIZE = 4


def next_token(request: Request) -> int:
    return 1000 + len(request.tokens)


def scheduler(blocks: int = 50, budget: int = 64, seqs: int = 8, max_model_len: int = 100) -> Scheduler:
    return Scheduler(KvCache(blocks, SIZE, max_model_len), Limits(budget, seqs), next_token)


def request(name: str, tokens: int, output: int = 2, first: int = 0, **more: Any) -> Request:
    return Request(name, list(range(first, first + tokens)), output, SIZE, **more)


def drain(engine: Scheduler, limit: int = 10_000) -> list[Output]:
    outputs: list[Output] = []
    for _ in range(limit):
        if not engine.busy:
            return outputs
        step = engine.schedule()
        assert step.chunks
        outputs += engine.update(step)[0]
    raise AssertionError("it does not end")


def test_a_long_prompt_is_computed_in_chunks() -> None:
    engine = scheduler(budget=10)
    engine.add(request("a", 25, output=1))
    sizes = []
    while engine.busy:
        step = engine.schedule()
        sizes.append(step.tokens)
        outputs, _ = engine.update(step)
        assert bool(outputs) == (len(sizes) == 3)
    assert sizes == [10, 10, 5]


def test_decodes_come_before_new_prompts_and_share_the_budget() -> None:
    engine = scheduler(budget=10)
    engine.add(request("a", 4, output=5))
    engine.update(engine.schedule())
    engine.add(request("b", 40, first=500))
    step = engine.schedule()
    assert [(chunk.request.id, chunk.tokens) for chunk in step.chunks] == [("a", 1), ("b", 9)]


def test_no_more_than_max_seqs_run() -> None:
    engine = scheduler(seqs=2)
    for index in range(3):
        engine.add(request(str(index), 5, first=100 * index))
    assert len(engine.schedule().admitted) == 2
    assert len(engine.waiting) == 1


def test_a_twin_in_the_same_step_hits_what_is_being_computed() -> None:
    """vLLM makes blocks hittable when it schedules them."""
    engine = scheduler()
    engine.add(request("a", 20))
    engine.add(request("b", 20))
    engine.schedule()
    assert [one.cached_tokens for one in engine.running] == [0, 16]


def test_the_youngest_is_preempted_and_computed_anew() -> None:
    engine = scheduler(blocks=9)
    for index, name in enumerate("ab"):
        engine.add(request(name, 14, output=8, first=100 * index))
    outputs = drain(engine)
    assert engine.preemptions > 0
    assert Counter(output.request.id for output in outputs) == {"a": 8, "b": 8}
    assert [o.request.preemptions > 0 for o in outputs if o.finish] == [False, True]
    assert engine.lookups.queries == 28  # looking up again after a preemption does not count


def test_the_eos_token_and_the_context_end_a_request() -> None:
    engine = scheduler(max_model_len=12)
    engine.add(request("a", 5, output=100, eos=1006))
    engine.add(request("b", 5, output=100, first=50))
    last = {output.request.id: output for output in drain(engine) if output.finish}
    assert (last["a"].finish, last["a"].token) == ("stop", 1006)
    assert last["b"].finish == "length"
    assert len(last["b"].request.tokens) == 12


def test_created_tokens_are_what_the_prompt_added() -> None:
    engine = scheduler()
    engine.add(request("a", 10))
    drain(engine)
    engine.add(request("b", 15))
    (first,) = [output for output in drain(engine) if output.first]
    assert (first.request.cached_tokens, first.request.created_tokens) == (8, 4)


def test_one_that_does_not_read_the_cache_still_fills_it() -> None:
    engine = scheduler()
    for _ in range(2):
        engine.add(request("a", 10, read_cache=False))
        assert drain(engine)[0].request.cached_tokens == 0
    assert engine.lookups.queries == 0
    engine.add(request("b", 10))
    assert drain(engine)[0].request.cached_tokens == 8


def test_an_abort_while_the_step_runs_frees_at_once_and_gives_no_token() -> None:
    engine = scheduler()
    one, other = request("a", 10), request("b", 10, first=200)
    engine.add(one)
    engine.add(other)
    step = engine.schedule()
    engine.abort(one)
    engine.abort(one)
    assert one.blocks == []
    assert [output.request for output in engine.update(step)[0]] == [other]
    engine.abort(other)
    assert engine.cache.pool.usage == 0


def test_a_reset_preempts_only_when_told() -> None:
    engine = scheduler()
    engine.add(request("a", 10, output=3))
    step = engine.schedule()
    assert not engine.reset_prefix_cache()
    assert engine.reset_prefix_cache(reset_running=True)
    assert engine.update(step)[0] == []  # what the step gave is dropped
    assert len(drain(engine)) == 3


def test_a_prompt_larger_than_the_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="blocks"):
        scheduler(blocks=4).add(request("a", 12))


prompts = st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(1, 9), st.sampled_from([None, "s"]))
actions = st.lists(
    st.one_of(prompts, st.sampled_from(["step", "step", "step", "abort", "reset", "reset running"])), max_size=80
)


@given(st.integers(14, 40), st.integers(1, 30), st.integers(1, 5), actions)
def test_whatever_happens_blocks_are_neither_lost_nor_shared_wrongly(
    blocks: int, budget: int, seqs: int, what: list[tuple[int, int, int, str | None] | str]
) -> None:
    engine = scheduler(blocks, budget, seqs, max_model_len=50)
    pool = engine.cache.pool
    requests: list[Request] = []
    for action in what:
        if isinstance(action, tuple):
            family, length, output, salt = action
            one = Request(str(len(requests)), [family] * length, output, SIZE, salt=salt)
            requests.append(one)
            engine.add(one)
        elif action == "abort" and requests:
            engine.abort(requests[len(requests) // 2])
        elif action.startswith("reset"):
            engine.reset_prefix_cache(reset_running=action == "reset running")
        else:
            step = engine.schedule()
            assert step.tokens <= budget
            engine.update(step)
        references = Counter(block.number for one in engine.running for block in one.blocks)
        assert all(block.refs == references[block.number] for block in pool.blocks)
        assert {block.number for block in pool.free_order()} == {b.number for b in pool.blocks[1:] if b.refs == 0}
        assert len(engine.running) <= seqs
        assert all(not one.blocks for one in engine.waiting)
    drain(engine)
    assert pool.usage == 0
    assert all(
        one.finish == "abort" or one.output_count == min(one.max_tokens, 50 - one.prompt_count) for one in requests
    )


@given(st.lists(prompts, min_size=1, max_size=30), st.integers(14, 30))
def test_events_alone_tell_what_can_be_hit(what: list[tuple[int, int, int, str | None]], blocks: int) -> None:
    """With copies counted: a removal takes one copy away."""
    engine = scheduler(blocks, budget=16, max_model_len=50)
    told: Counter[bytes] = Counter()
    for index, (family, length, output, salt) in enumerate(what):
        engine.add(Request(str(index), [family] * length, output, SIZE, salt=salt))
        while engine.busy and (index % 3 == 2 or index == len(what) - 1):
            for event in engine.update(engine.schedule())[1]:
                if isinstance(event, Stored):
                    told.update(event.hashes)
                elif isinstance(event, Removed):
                    told[event.hash] -= 1
    assert +told == Counter(block.hash for block in engine.cache.pool.blocks if block.hash)
