"""Limits that several gateways share, in Redis. Needs the extra `redis`; nothing else of the gateway imports this."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvgate.errors import Problem, UsageError
from server.tenants.budget import (
    CONCURRENCY_WAIT,
    Lease,
    Limits,
    UnlimitedLease,
    Waits,
    input_charge,
    over_limit,
    too_large,
)
from server.tenants.redis_batch import UNREACHABLE, Batches
from server.tenants.redis_scripts import ACQUIRE, RENEW, SETTLE

logger = logging.getLogger("kvgate")

PAUSE = 1.0  # seconds without Redis after it failed, so that not every request waits for the time-out
WARN_EVERY = 60.0


class RedisLease:
    """See Lease. `release` sends what `settle` noted, in the background."""

    __slots__ = (
        "_cached_weight",
        "_estimate",
        "_limits",
        "_released",
        "_settled",
        "name",
        "output",
        "refund",
        "tenant",
    )

    def __init__(self, limits: RedisLimits, tenant: str, name: str, estimate: int, cached_weight: float) -> None:
        self._limits = limits
        self._estimate = estimate
        self._cached_weight = cached_weight
        self._settled = self._released = False
        self.tenant = tenant
        self.name = name
        self.refund = 0.0  # input tokens that were charged too much; below zero, too little
        self.output = 0

    def settle(self, prompt: int | None, cached: int | None, output: int | None) -> None:
        if self._settled or self._released:
            return
        self._settled = True
        if prompt is not None:
            self.refund = self._estimate - input_charge(prompt, cached, self._cached_weight)
        self.output = max(0, output or 0)

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._limits.give_back(self)


class RedisLimits:
    """Grants leases that count for all gateways at the same Redis.

    url: redis://, rediss:// or unix://. fail_open: whether requests pass without limits while Redis cannot be reached, or get
    503. timeout: seconds for a connection and for an answer. lease_seconds: after which a gateway that died holds no place
    any more; a living one renews its leases three times as often. clock: seconds, for tests; None is Redis's own.
    `unreachable` counts requests that were decided without Redis, `unsettled` those whose counts could not be sent.
    """

    def __init__(
        self,
        url: str,
        limits_of: Callable[[str], Limits],
        *,
        fail_open: bool = True,
        timeout: float = 0.25,
        lease_seconds: float = 60.0,
        clock: Callable[[], float] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            self._redis = Redis.from_url(
                url,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                retry=Retry(NoBackoff(), 0),  # a script that ran and whose answer was lost must not run again
            )
        except ValueError as error:
            raise UsageError(f"the address of Redis is wrong: {error}") from None
        self._batches = Batches(self._redis)
        self._limits_of = limits_of
        self._fail_open = fail_open
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._monotonic = monotonic
        self._prefix = secrets.token_hex(8)
        self._count = itertools.count(1)
        self._running: dict[str, dict[str, RedisLease]] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._paused_until = self._warn_at = float("-inf")
        self.unreachable = 0
        self.unsettled = 0

    # -- life

    async def start(self) -> None:
        """Begins to renew leases. Does not wait for Redis: what holds while it is away is configured."""
        self._renewing = asyncio.create_task(self._renew_always())

    async def stop(self) -> None:
        """Sends what is still to be sent, and closes the connections."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        await self._batches.idle()
        await self._redis.aclose()

    async def settled(self) -> None:
        """Returns once all released leases have been sent."""
        await self._batches.idle()

    # -- leases

    async def acquire(self, tenant: str, input_tokens: int) -> Lease | Problem:
        """As MemoryLimits.acquire, in one round trip; a tenant without limits takes none.

        Cancelled while it waits, it has cost nothing but perhaps one request.
        """
        limits = self._limits_of(tenant)
        if limits.unlimited:
            return UnlimitedLease()
        problem = too_large(tenant, input_tokens, limits)
        if problem is not None:
            return problem
        if self._monotonic() < self._paused_until:
            return self._without_redis()
        name = f"{self._prefix}:{next(self._count)}"
        lease = RedisLease(self, tenant, name, input_tokens, limits.cached_weight)
        answer = self._batches.call(
            ACQUIRE,
            _keys(tenant),
            (*self._head(limits), input_tokens, name, self._lease_seconds),
            abandoned=lambda waits: None if any(waits) else _cancel(lease),
        )
        try:
            requests, tokens, output, crowded = await answer
        except asyncio.CancelledError:
            if not answer.cancelled() and answer.exception() is None and not any(answer.result()):
                _cancel(lease)  # granted in the same turn of the loop in which the request left
            raise
        except UNREACHABLE as error:
            self._failed(error)
            return self._without_redis()
        if requests or tokens or output or crowded:
            wait = CONCURRENCY_WAIT if crowded else 0.0
            return over_limit(tenant, limits, Waits(requests / 1000, tokens / 1000, output / 1000, wait))
        if limits.concurrency is not None:
            self._running.setdefault(tenant, {})[name] = lease
        return lease

    def give_back(self, lease: RedisLease) -> None:
        """What RedisLease.release calls."""
        running = self._running.get(lease.tenant)
        if running is not None:
            running.pop(lease.name, None)
            if not running:
                del self._running[lease.tenant]
        if self._monotonic() < self._paused_until:
            self.unsettled += 1
            return
        # under the limits of now: those of then could take a bucket away that a reload has brought
        arguments = (*self._head(self._limits_of(lease.tenant)), lease.refund, lease.output, lease.name)
        self._batches.call(SETTLE, _keys(lease.tenant), arguments).add_done_callback(self._gave_back)

    def _gave_back(self, answer: asyncio.Future[Any]) -> None:
        error = None if answer.cancelled() else answer.exception()
        if error is not None:
            self.unsettled += 1
            self._failed(error)

    async def renew(self) -> None:
        """Renews the leases of all running requests."""
        now = "" if self._clock is None else self._clock()
        for tenant, running in list(self._running.items()):
            try:
                await self._batches.call(RENEW, _keys(tenant)[1:], (now, self._lease_seconds, *running))
            except UNREACHABLE as error:
                self._failed(error)

    async def _renew_always(self) -> None:
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            await self.renew()

    def _head(self, limits: Limits) -> tuple[str | float, ...]:
        counts = (
            limits.requests_per_minute,
            limits.input_tokens_per_minute,
            limits.output_tokens_per_minute,
            limits.concurrency,
        )
        now = "" if self._clock is None else self._clock()
        return (now, *(-1 if count is None else count for count in counts))

    # -- without Redis

    def _without_redis(self) -> Lease | Problem:
        self.unreachable += 1
        if self._fail_open:
            return UnlimitedLease()
        return Problem(
            503,
            "limits_unavailable",
            "The tenant's limits cannot be checked at the moment. Try again shortly.",
            retry_after=1,
            reason="limits_unavailable",
        )

    def _failed(self, error: BaseException) -> None:
        now = self._monotonic()
        self._paused_until = now + PAUSE
        if now >= self._warn_at:
            self._warn_at = now + WARN_EVERY
            outcome = "pass without limits" if self._fail_open else "are answered 503"
            logger.warning("Redis failed (%s): requests %s until it is back", _reason(error), outcome)


def _cancel(lease: RedisLease) -> None:
    """Gives back what was granted to a request that had left."""
    lease.settle(0, 0, 0)
    lease.release()


def _reason(error: BaseException) -> str:
    """The kind of fault, not its text: that may hold the address with its password."""
    return type(error).__name__


def _keys(tenant: str) -> tuple[str, str]:
    """The braces put both into one slot of a cluster."""
    return f"kvgate:{{{tenant}}}:levels", f"kvgate:{{{tenant}}}:leases"
