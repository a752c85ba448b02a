"""The workload, decided before the first request: who shares which prefix, how long all is, and when it is due.

A phase has `groups`; the sessions of a group share a prefix; the turns of a session extend each other. Planned ids
stand in for the model's answers, so that both arms send the same bytes whatever the model says. Lengths are in tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvgate.errors import UsageError
from loadtest.schedule import Load, OpenLoop, offsets_ns
from loadtest.vocabulary import Ids, Vocabulary, draw, fingerprint

Phase = Literal["unloaded", "loaded"]


@dataclass(frozen=True, slots=True)
class Shape:
    """groups x sessions x turns requests; a turn is suffix_tokens of question and output_tokens of answer."""

    groups: int
    sessions: int
    turns: int
    prefix_tokens: int
    suffix_tokens: int
    output_tokens: int

    @property
    def requests(self) -> int:
        return self.groups * self.sessions * self.turns

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer: what the model's context must hold."""
        return self.prefix_tokens + self.turns * (self.suffix_tokens + self.output_tokens)

    def prompt_tokens(self, turn: int) -> int:
        return self.prefix_tokens + turn * (self.suffix_tokens + self.output_tokens) + self.suffix_tokens

    def shared_tokens(self, turn: int) -> int:
        """Leading tokens that an earlier request already had: the group's prefix, or the session's last prompt.

        The answer between two turns does not count: the engine's differs from the planned one.
        """
        return self.prefix_tokens if turn == 0 else self.prompt_tokens(turn - 1)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """`session` counts within its group; `at_ns` is the offset from the start of the window, None in a closed loop."""

    phase: Phase
    index: int
    group: int
    session: int
    turn: int
    prompt_tokens: int
    shared_tokens: int
    output_tokens: int
    at_ns: int | None
    sha256: str


@dataclass(frozen=True, slots=True)
class Plan:
    """All that both arms will send. `prompt` expands a request to its ids and checks them against its sha256."""

    seed: int
    vocabulary: Vocabulary
    shapes: dict[Phase, Shape]
    load: Load
    requests: tuple[PlannedRequest, ...]

    def of(self, phase: Phase) -> tuple[PlannedRequest, ...]:
        return tuple(r for r in self.requests if r.phase == phase)

    def prefix(self, phase: Phase, group: int) -> Ids:
        shape = self.shapes[phase]
        return draw(self.seed, f"{phase}/prefix/{group}", shape.prefix_tokens, self.vocabulary, group)

    def warmup(self, phase: Phase) -> Ids:
        """A prompt as long as the phase's first one that shares nothing with it."""
        count = self.shapes[phase].prompt_tokens(0)
        return draw(self.seed, f"{phase}/prefix/warmup", count, self.vocabulary, self.shapes[phase].groups)

    def prompt(self, request: PlannedRequest) -> Ids:
        ids = _expand(self, request.phase, request.group, request.session, request.turn)
        if fingerprint(ids) != request.sha256:
            raise UsageError(
                f"plan: request {request.index} of phase {request.phase} does not expand to the ids it was made with; "
                "write the plan again with this version"
            )
        return ids


def _expand(plan: Plan, phase: Phase, group: int, session: int, turn: int) -> Ids:
    shape, parts = plan.shapes[phase], [plan.prefix(phase, group)]
    for t in range(turn + 1):
        suffix = f"{phase}/suffix/{group}/{t}/{session}"
        parts.append(draw(plan.seed, suffix, shape.suffix_tokens, plan.vocabulary, session))
        if t < turn:
            answer = f"{phase}/answer/{group}/{t}/{session}"
            parts.append(draw(plan.seed, answer, shape.output_tokens, plan.vocabulary, session))
    return np.concatenate(parts)


def _order(seed: int, phase: Phase, shape: Shape) -> Iterator[tuple[int, int, int]]:
    """Turn by turn, so that a session's turns are far apart; within a turn groups and sessions in a seeded shuffle.

    Sorting by hash is a shuffle that no Python version will change.
    """
    for turn in range(shape.turns):
        members = [(g, s, turn) for g in range(shape.groups) for s in range(shape.sessions)]
        yield from sorted(members, key=lambda m: hashlib.sha256(f"{seed}/{phase}/order/{m}".encode()).digest())


def make_plan(
    *, seed: int, load: Load, unloaded: Shape | None, loaded: Shape | None, vocabulary: Vocabulary | None = None
) -> Plan:
    """Deterministic in its arguments. Raises UsageError where sharing could not be exact."""
    vocabulary = vocabulary or Vocabulary()
    shapes: dict[Phase, Shape] = {}
    if unloaded is not None:
        shapes["unloaded"] = unloaded
    if loaded is not None:
        shapes["loaded"] = loaded
    requests: list[PlannedRequest] = []
    for phase, shape in shapes.items():
        if max(shape.sessions, shape.groups + 1) > vocabulary.span:
            raise UsageError(
                f"--vocab {vocabulary}: {shape.groups} groups of {shape.sessions} sessions need as many distinct "
                "first tokens; widen the range"
            )
        due: tuple[int | None, ...] = (None,) * shape.requests
        if phase == "loaded" and isinstance(load, OpenLoop):
            due = offsets_ns(load, shape.requests, seed)
        bare = Plan(seed, vocabulary, shapes, load, ())
        for index, (group, session, turn) in enumerate(_order(seed, phase, shape)):
            requests.append(
                PlannedRequest(
                    phase=phase,
                    index=index,
                    group=group,
                    session=session,
                    turn=turn,
                    prompt_tokens=shape.prompt_tokens(turn),
                    shared_tokens=shape.shared_tokens(turn),
                    output_tokens=shape.output_tokens,
                    at_ns=due[index],
                    sha256=fingerprint(_expand(bare, phase, group, session, turn)),
                )
            )
    return Plan(seed, vocabulary, shapes, load, tuple(requests))
