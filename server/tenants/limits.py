"""Limits kept in this process: for one gateway, or for several that each grant their own."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvgate.errors import Problem
from server.tenants.budget import (
    CONCURRENCY_WAIT,
    EPSILON,
    Limits,
    Waits,
    input_charge,
    over_limit,
    too_large,
)

UNLIMITED = float("inf")
SWEEP_FROM = 1024  # budgets held before those that are full and idle are dropped


class Budget:
    """One tenant's three buckets and running requests. Levels are what is left; below zero is debt.

    An unlimited bucket is infinite and refills at 0/s, so that the arithmetic is the same for all.
    """

    __slots__ = (
        "at",
        "concurrency",
        "input",
        "input_cap",
        "input_rate",
        "limits",
        "open",
        "output",
        "output_cap",
        "output_rate",
        "requests",
        "requests_cap",
        "requests_rate",
    )

    def __init__(self, limits: Limits, now: float) -> None:
        self.at = now
        self.open = 0
        self.requests = self.input = self.output = UNLIMITED
        self.set(limits)

    def set(self, limits: Limits) -> None:
        """Puts other limits in force. What was used and what runs still counts."""
        self.limits = limits
        self.requests_cap, self.requests_rate = _bucket(limits.requests_per_minute)
        self.input_cap, self.input_rate = _bucket(limits.input_tokens_per_minute)
        self.output_cap, self.output_rate = _bucket(limits.output_tokens_per_minute)
        self.concurrency = UNLIMITED if limits.concurrency is None else limits.concurrency
        self.requests = _kept(self.requests, self.requests_cap)
        self.input = _kept(self.input, self.input_cap)
        self.output = _kept(self.output, self.output_cap)

    def refill(self, now: float) -> None:
        passed = now - self.at
        if passed > 0:
            self.at = now
            level = self.requests + passed * self.requests_rate
            self.requests = level if level < self.requests_cap else self.requests_cap
            level = self.input + passed * self.input_rate
            self.input = level if level < self.input_cap else self.input_cap
            level = self.output + passed * self.output_rate
            self.output = level if level < self.output_cap else self.output_cap

    def waits(self, input_tokens: int) -> Waits:
        return Waits(
            _wait(1, self.requests, self.requests_rate),
            _wait(input_tokens, self.input, self.input_rate),
            _wait(1, self.output, self.output_rate),
            CONCURRENCY_WAIT if self.open >= self.concurrency else 0.0,
        )

    @property
    def as_new(self) -> bool:
        return (
            self.open == 0
            and self.requests >= self.requests_cap
            and self.input >= self.input_cap
            and self.output >= self.output_cap
        )


def _bucket(per_minute: int | None) -> tuple[float, float]:
    return (UNLIMITED, 0.0) if per_minute is None else (float(per_minute), per_minute / 60.0)


def _kept(level: float, cap: float) -> float:
    """A bucket's level under another cap; one without a limit does not remember."""
    return cap if cap == UNLIMITED else min(level, cap)


def _wait(need: float, level: float, rate: float) -> float:
    return 0.0 if level >= need - EPSILON else (need - level) / rate


class MemoryLease:
    """See Lease."""

    __slots__ = ("_budget", "_clock", "_estimate", "_state")

    def __init__(self, budget: Budget, clock: Callable[[], float], estimate: int) -> None:
        self._budget = budget
        self._clock = clock
        self._estimate = estimate
        self._state = 0  # 1 settled, 2 released

    def settle(self, prompt: int | None, cached: int | None, output: int | None) -> None:
        if self._state:
            return
        self._state = 1
        budget = self._budget
        budget.refill(self._clock())  # before the charge: a full bucket that was not yet used does not pay for it
        if prompt is not None:
            charge = input_charge(prompt, cached, budget.limits.cached_weight)
            budget.input = min(budget.input + self._estimate - charge, budget.input_cap)
        if output:
            budget.output -= max(0, output)

    def release(self) -> None:
        if self._state != 2:
            self._state = 2
            self._budget.open -= 1


class MemoryLimits:
    """Grants leases. `limits_of` gives a tenant's limits, `clock` monotonic seconds.

    Memory is bounded by the tenants that have running requests or have used something within their last refill.
    """

    def __init__(self, limits_of: Callable[[str], Limits], clock: Callable[[], float] = time.monotonic) -> None:
        self._limits_of = limits_of
        self._clock = clock
        self._budgets: dict[str, Budget] = {}
        self._sweep_at = SWEEP_FROM

    def __len__(self) -> int:
        return len(self._budgets)

    def acquire(self, tenant: str, input_tokens: int) -> MemoryLease | Problem:
        """A lease, or 429 with the reason. `input_tokens` is an estimate, at least 0. All limits are charged, or none."""
        now = self._clock()
        budget = self._budgets.get(tenant)
        if budget is None:
            budget = self._new(tenant, now)
        else:
            budget.refill(now)
        if (
            budget.requests >= 1 - EPSILON
            and budget.input >= input_tokens - EPSILON
            and budget.output >= 1 - EPSILON
            and budget.open < budget.concurrency
        ):
            budget.requests -= 1
            budget.input -= input_tokens
            budget.open += 1
            return MemoryLease(budget, self._clock, input_tokens)
        limits = budget.limits
        return too_large(tenant, input_tokens, limits) or over_limit(tenant, limits, budget.waits(input_tokens))

    def running(self, tenant: str) -> int:
        """Leases of the tenant that are not yet released."""
        budget = self._budgets.get(tenant)
        return 0 if budget is None else budget.open

    def reload(self) -> None:
        """Asks `limits_of` anew for every tenant, after the key file has changed."""
        now = self._clock()
        for tenant, budget in self._budgets.items():
            budget.refill(now)
            budget.set(self._limits_of(tenant))

    def _new(self, tenant: str, now: float) -> Budget:
        if len(self._budgets) >= self._sweep_at:
            for name, budget in list(self._budgets.items()):
                budget.refill(now)
                if budget.as_new:
                    del self._budgets[name]
            self._sweep_at = max(SWEEP_FROM, 2 * len(self._budgets))
        budget = self._budgets[tenant] = Budget(self._limits_of(tenant), now)
        return budget
