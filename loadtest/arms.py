"""Two arms on one engine, by cache_salt: no restart, no developer mode.

A salt keys the engine's block hashes, so requests share cached blocks only with requests of the same salt. A fresh salt
for each request is an engine without reuse (off); one fresh salt a block of time is an engine that starts cold and then
reuses (on). Salts come from the operating system's randomness, never from the seed: the same plan run twice must not
find the first run's blocks. Salted requests still fill the cache, so loaded arms take turns in blocks of time.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from loadtest.client import Shot, completion_body
from loadtest.outcome import Arm
from loadtest.plan import Phase, Plan, PlannedRequest
from loadtest.vocabulary import Ids

SaltSource = Callable[[], str]

ARMS: tuple[Arm, ...] = ("off", "on")
CANARY_BLOCK = -1


def fresh_salt() -> str:
    """128 random bits in hex: the engine refuses `/` and `@`, which base64 may hold."""
    return secrets.token_hex(16)


def blocks_of(arms: Sequence[Arm], order: str) -> tuple[Arm, ...]:
    """`ABBA` over (off, on) is off, on, on, off: slow drift of the machine falls on both arms alike.

    With one arm each letter is a block of it. Raises ValueError for other letters.
    """
    letters = {"A": arms[0], "B": arms[-1]}
    if not order or set(order) - set(letters):
        raise ValueError("an order is made of the letters A (the first arm) and B (the second)")
    if set(order) != {"A", "B"} and len(arms) == 2:
        raise ValueError("an order for two arms needs both A and B")
    return tuple(letters[letter] for letter in order)


class Loader:
    """Turns planned requests into shots for one model: the plan's ids, the arm's salt."""

    def __init__(self, plan: Plan, model: str, salts: SaltSource = fresh_salt) -> None:
        self._plan = plan
        self._model = model
        self.salts = salts

    def shot(self, request: PlannedRequest, arm: Arm, block: int, salt: str) -> Shot:
        ids = self._plan.prompt(request)
        return Shot(request, arm, block, completion_body(self._model, ids, request.output_tokens, salt))

    def block(self, phase: Phase, arm: Arm, block: int, salt: str) -> list[Shot]:
        """The whole phase under one arm. `salt` is the block's own; the off arm takes a new one for each request."""
        return [
            self.shot(request, arm, block, salt if arm == "on" else self.salts()) for request in self._plan.of(phase)
        ]

    def bare(self, phase: Phase, ids: Ids, group: int, salt: str, arm: Arm = "on") -> Shot:
        """A request outside the plan (warm-up, priming, canary): `ids` in, one token out."""
        request = PlannedRequest(
            phase=phase,
            index=-1,
            group=group,
            session=-1,
            turn=0,
            prompt_tokens=len(ids),
            shared_tokens=len(ids),
            output_tokens=1,
            at_ns=None,
            sha256="",
        )
        return Shot(request, arm, CANARY_BLOCK, completion_body(self._model, ids, 1, salt))
