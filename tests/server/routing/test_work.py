"""Work in tokens: begun, computed, ended; each counted once, whatever comes first."""

from hypothesis import given
from hypothesis import strategies as st

from server.routing.work import NEVER, Work
from tests.server.clock import Clock


def test_a_job_counts_until_its_first_token_and_its_memory_until_its_end() -> None:
    work = Work()
    job = work.begin(100, 150, due=9.0)
    assert (work.queued, work.kv) == (100, 150)
    work.computed(job)
    assert (work.queued, work.kv) == (0, 150)
    work.end(job)
    assert (work.queued, work.kv) == (0, 0)


def test_an_unseen_first_token_is_taken_to_have_come_when_it_is_due() -> None:
    work = Work()
    job = work.begin(100, 150, due=9.0)
    work.begin(7, 7, due=20.0)
    assert work.next_due == 9.0
    work.expire(8.9)
    assert work.queued == 107
    work.expire(9.0)
    assert (work.queued, work.kv, work.next_due) == (7, 157, 20.0)
    work.end(job)
    assert (work.queued, work.kv) == (7, 7)


def test_the_oldest_prompt_is_the_one_that_is_computed() -> None:
    clock = Clock(1.0)
    work = Work(clock)
    jobs = [work.begin(size, 0, due=99.0) for size in (10, 20, 30)]
    assert (work.front, work.since) == (10, 1.0)
    clock.now = 2.0
    work.computed(jobs[1])
    assert (work.front, work.since) == (10, 1.0)
    clock.now = 3.0
    work.computed(jobs[0])
    assert (work.front, work.since) == (30, 3.0)
    work.expire(99.0)
    assert (work.front, work.queued) == (0, 0)
    clock.now = 100.0
    work.begin(40, 0, due=199.0)
    assert (work.front, work.since) == (40, 100.0)


def test_a_prompt_that_is_held_whole_stands_in_nobodys_way() -> None:
    work = Work()
    whole = work.begin(0, 50, due=900.0)
    job = work.begin(100, 150, due=901.0)
    work.computed(job)
    assert work.next_due == NEVER
    work.end(whole)
    assert work.kv == 150


@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "computed", "end", "expire"]), st.integers(0, 20), st.integers(0, 5)),
        max_size=60,
    )
)
def test_what_is_queued_is_the_sum_of_the_jobs_that_are_not_computed(steps: list[tuple[str, int, int]]) -> None:
    work, now = Work(), 0.0
    jobs, queued, held, due = [], {}, {}, {}
    for step, number, size in steps:
        if step == "begin":
            job = work.begin(size, size + 1, now + number)
            jobs.append(job)
            queued[job], held[job], due[job] = size, size + 1, now + number
        elif step == "expire":
            now += number
            work.expire(now)
            queued = {job: 0 if due[job] <= now else left for job, left in queued.items()}
        elif jobs:
            job = jobs[number % len(jobs)]
            queued[job] = 0
            if step == "end":
                held[job] = 0
                work.end(job)
            else:
                work.computed(job)
        assert work.queued == sum(queued.values())
        assert work.front == next((left for left in queued.values() if left), 0)
        assert work.kv == sum(held.values())
    for job in jobs:
        work.end(job)
    assert (work.queued, work.kv) == (0, 0)
    work.expire(now)
    assert work.next_due == NEVER
