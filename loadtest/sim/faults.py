"""Faults of a replica, as JSON sets them: each field with its unit, a wrong one refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

HELP = {
    "stall_s": "no step is computed for so long, from now",
    "slow_start_s": "steps take slow_start_factor times as long for so long, from now and after each restart",
    "slow_start_factor": "see slow_start_s",
    "restart_down_s": "now: drop every connection and all state, and come back empty after so long",
    "error_share": "of generation requests, answered with error_status",
    "error_status": "from 400 to 599",
    "reset_share": "of generation requests, whose connection is reset",
    "reset_after_tokens": "output tokens before the reset; 0 gives no answer at all",
    "event_loss_share": "of KV event frames, never sent; they keep their number and can be replayed",
}


@dataclass(frozen=True, slots=True)
class Faults:
    """What is wrong with a replica; the fields are explained in HELP."""

    stall_s: float = 0.0
    slow_start_s: float = 0.0
    slow_start_factor: float = 4.0
    restart_down_s: float | None = None
    error_share: float = 0.0
    error_status: int = 503
    reset_share: float = 0.0
    reset_after_tokens: int = 0
    event_loss_share: float = 0.0

    def changed(self, given: Mapping[str, object]) -> Faults:
        """With these fields set; null puts a field back. Raises ValueError that names the field and what it takes."""
        defaults = {field.name: field.default for field in fields(Faults)}
        changes: dict[str, Any] = {}
        for name, value in given.items():
            if name not in defaults:
                raise ValueError(f"{name}: there is no such fault; there are {', '.join(HELP)}")
            changes[name] = defaults[name] if value is None else _checked(name, value)
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


NONE = Faults()


def _checked(name: str, value: object) -> object:
    whole = isinstance(value, int) and not isinstance(value, bool)
    number = whole or isinstance(value, float)
    for suffix, kind, least, most, text in _RANGES:
        if name.endswith(suffix):
            if not ((whole if kind is int else number) and least <= value <= most):  # type: ignore[operator]
                raise ValueError(f"{name}: give {text}")
            return value
    raise AssertionError(name)


_RANGES: tuple[tuple[str, type, float, float, str], ...] = (
    ("_share", float, 0, 1, "a share from 0 to 1"),
    ("_s", float, 0, 86_400, "seconds from 0 to 86400"),
    ("_factor", float, 1, 1000, "a factor from 1 to 1000"),
    ("_status", int, 400, 599, "an HTTP status from 400 to 599"),
    ("_tokens", int, 0, 10**9, "a number of tokens, 0 or more"),
)


class Injector:
    """The faults of one replica over time. clock: seconds that only grow. seed: what shares are drawn from."""

    def __init__(self, faults: Faults, seed: int, clock: Callable[[], float]) -> None:
        self.faults = faults
        self._random = random.Random(seed)
        self._clock = clock
        now = clock()
        self._stalled_until = now + faults.stall_s
        self._slow_until = now + faults.slow_start_s

    def change(self, given: Mapping[str, object]) -> None:
        """Only what is given changes; stall and slow start run from now. Raises ValueError, and changes nothing then."""
        self.faults = self.faults.changed(given)
        if "stall_s" in given:
            self._stalled_until = self._clock() + self.faults.stall_s
        if "slow_start_s" in given:
            self._slow_until = self._clock() + self.faults.slow_start_s

    def restarted(self) -> None:
        self._stalled_until = self._clock()
        self._slow_until = self._clock() + self.faults.slow_start_s

    def stalled(self) -> bool:
        return self._clock() < self._stalled_until

    def factor(self) -> float:
        """How many times as long a step takes."""
        return self.faults.slow_start_factor if self._clock() < self._slow_until else 1.0

    def error(self) -> int | None:
        """The status that this request is answered with."""
        return self.faults.error_status if self._hit(self.faults.error_share) else None

    def reset_after(self) -> int | None:
        """The output tokens after which this request's connection is reset."""
        return self.faults.reset_after_tokens if self._hit(self.faults.reset_share) else None

    def event_lost(self) -> bool:
        return self._hit(self.faults.event_loss_share)

    def _hit(self, share: float) -> bool:
        return share > 0 and self._random.random() < share
