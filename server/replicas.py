"""The engines behind the gateway: which there are, which are fit for a request, and the choice of one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from time import monotonic
from typing import Any

from kvgate.errors import UsageError
from server.breaker import Breaker, BreakerLimits, Failure
from server.exchange.upstream import EnginePool
from server.metrics import GatewayMetrics
from server.replica import EngineUrl, Replica, Stage
from server.routing.asked import UNKNOWN, Asked
from server.routing.cost import CostPolicy
from server.routing.policy import Policy
from server.routing.session import SessionPolicy

__all__ = ["MAX_INFLIGHT", "POLICIES", "EngineUrl", "Failure", "Replica", "ReplicaSet", "Stage"]

logger = logging.getLogger("kvgate")

POLICIES = ("cost", "session", "least-load", "round-robin")
# vLLM runs so many sequences at once on GPUs of less than 70 GiB (its --max-num-seqs). More would wait inside the engine, in
# order of arrival: without the gateway's priorities, fairness and time-out, and lost with the engine.
MAX_INFLIGHT = 256


def _nobody(*args: object) -> None:
    """Stands where nobody listens yet."""


class ReplicaSet:
    """All replicas and the policy that picks among them.

    Each attempt to answer a request begins with `pick` and ends with exactly one of `succeeded`, `failed` and `gave_up`.
    max_inflight: requests for each replica at once, from which `capacity` is made.
    """

    def __init__(
        self,
        urls: Iterable[EngineUrl],
        policy: str,
        metrics: GatewayMetrics,
        max_inflight: int = MAX_INFLIGHT,
        limits: BreakerLimits | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        if policy not in POLICIES:
            raise UsageError(f"--policy {policy!r} is not one of {', '.join(POLICIES)}")
        self._round_robin = policy == "round-robin"
        self.policy: Policy | None = {"cost": CostPolicy, "session": SessionPolicy}.get(policy, lambda: None)()
        self._turn = 0
        self._metrics = metrics
        self._max_inflight = max_inflight
        self._limits = limits
        self._clock = clock
        self._total = 0
        self._capacity: dict[str, int] = {}  # by model
        self._pools: dict[str, str] = {}
        self._out = 0  # replicas whose breaker is not closed
        self.all: list[Replica] = []  # those that are wanted; never changed in place
        self.draining: dict[str, Replica] = {}  # by name: not wanted any more, but not yet idle
        self.by_model: dict[str, list[Replica]] = {}
        self.on_add: Callable[[Replica], None] = _nobody
        self.on_learn: Callable[[Replica], None] = _nobody  # it answered, and said which models it serves
        self.on_restart: Callable[[Replica], None] = _nobody  # its metrics show another process
        self.on_gone: Callable[[Replica], None] = _nobody
        self.on_doubt: Callable[[Replica], None] = _nobody  # something should look at it now
        self.on_capacity: Callable[[], None] = _nobody  # it may have risen
        every = list(urls)
        names = [url.name for url in every]
        if len(set(names)) != len(names):
            raise UsageError(f"--engine names the same engine twice: {', '.join(sorted(names))}")
        self.reconcile(every)

    # -- what is there

    @property
    def served(self) -> Collection[str]:
        """Every model name that some replica has told, now or before it went down."""
        return self.by_model.keys()

    @property
    def ready(self) -> bool:
        return any(replica.up and replica.models for replica in self.all)

    def capacity(self, model: str | None = None) -> int:
        """Requests that the fit replicas (of `model`, if given) take at once. Where none is fit, those that are up count."""
        return self._total if model is None else self._capacity.get(model, 0)

    def pool_of(self, model: str) -> str:
        """One name for all models that the same replicas serve, such as a model and its adapters: they share its capacity."""
        return self._pools.get(model, model)

    def reconcile(self, wanted: Iterable[EngineUrl]) -> None:
        """Adds the replicas that are wanted, and drains those that are not. One that drains and is wanted again is taken back."""
        urls = {url.name: url for url in sorted(wanted, key=str)}
        kept = [replica for replica in self.all if urls.get(replica.name) == replica.url]
        for replica in self.all:
            if replica not in kept:
                replica.stage = Stage.DRAINING
                self.draining[replica.name] = replica
                logger.info("%s is no longer wanted; %d requests run", replica.name, replica.inflight)
        new = []
        for url in urls.values():
            if url.name in self.draining:
                if self.draining[url.name].url == url:
                    replica = self.draining.pop(url.name)
                    replica.stage = Stage.ACTIVE
                    kept.append(replica)
                continue  # the same name with another scheme: once the old one is gone
            if not any(replica.name == url.name for replica in kept):
                new.append(self._make(url))
        if kept == self.all and not new:
            return
        self.all = kept + new
        self._index()
        for replica in self.draining.values():
            self.on_doubt(replica)
        for replica in new:
            self.on_add(replica)

    def forget(self, replica: Replica) -> bool:
        """Ends a replica that is not wanted and has nothing to do: its connections and its metrics. False if it is not so far."""
        if replica.stage is not Stage.DRAINING or replica.inflight:
            return False
        replica.stage = Stage.GONE
        del self.draining[replica.name]
        self._out -= replica.breaker.out
        replica.pool.close()
        self.on_gone(replica)
        self._metrics.drop_replica(replica.name)
        logger.info("%s is gone", replica.name)
        return True

    def known(self) -> list[Replica]:
        """Those that are wanted, then those that drain."""
        return [*self.all, *self.draining.values()]

    def close(self) -> None:
        """Closes the connections that wait for work."""
        for replica in self.known():
            replica.pool.close()

    # -- what is learned of a replica

    def mark(self, replica: Replica, up: bool) -> None:
        """Notes whether a replica answers."""
        if replica.up != up and replica.stage is not Stage.GONE:
            replica.up = up
            self._metrics.replica_up.labels(replica.name).set(int(up))
            if up:
                replica.breaker.wake()  # an engine that came back need not wait
            self._weigh(replica)

    def learn(self, replica: Replica, models: dict[str, dict[str, Any]]) -> None:
        """Notes which models a replica serves."""
        known, replica.models = replica.models, models
        if known.keys() != models.keys():
            self._index()
        self.on_learn(replica)

    def dated(self, replica: Replica, started: float | None) -> None:
        """Notes when its process began, in seconds since the epoch; None is unknown.

        Only a later beginning is a restart: behind one address may stand several engines, whose pages come in turn.
        """
        before = replica.started
        if started is not None and (before is None or started > before):
            replica.started = started
            if before is not None:
                self.on_restart(replica)

    def began(self, replica: Replica) -> None:
        """The first byte of a good answer is here. Not needed, but a long answer then closes a breaker at its beginning."""
        if replica.breaker.out and replica.breaker.succeeded():
            self._closed(replica)

    def succeeded(self, replica: Replica) -> None:
        """An attempt was answered, with any status below 500."""
        if replica.breaker.succeeded():
            self._closed(replica)

    def failed(self, replica: Replica, why: Failure, retry: bool = False) -> None:
        """An attempt failed through the replica's fault. `retry`: it had failed elsewhere before.

        A status that a retry gets is not held against the replica: it is likely to be the request that breaks engines, and
        must not break all of them. A connection that cannot be had leaves no doubt, whatever was to be sent over it.
        """
        if replica.stage is Stage.GONE:
            return
        if why is Failure.STATUS and retry:
            replica.breaker.gave_up()
            return
        if replica.breaker.failed(at_once=why is Failure.CONNECT):
            self._out += 1
            logger.warning("%s gets no requests for now: %s", replica.name, why)
            self._weigh(replica)
        if why is not Failure.STATUS:
            self.on_doubt(replica)

    def gave_up(self, replica: Replica) -> None:
        """An attempt ended without a verdict: its client left."""
        replica.breaker.gave_up()

    # -- the choice

    def pick(self, model: str, tried: Collection[Replica] = (), asked: Asked = UNKNOWN) -> Replica | None:
        """A replica that is up and serves `model`, none of `tried`; None if there is none. Ties rotate.

        `asked` is what a policy that looks at prompts or sessions goes by.

        One whose breaker is out is picked to probe it, or where there is no other.
        """
        holders = self.by_model.get(model, ())
        if self._out and (replica := self._out_of_turn(holders, tried)):
            replica.breaker.probe()
            return replica
        if self.policy is not None:
            fit = self.fit_for(model, tried)
            return self.policy.choose(fit, asked) if fit else None
        choices: list[Replica] = []
        least = 0
        for replica in holders:
            if replica.fit and replica not in tried:
                load = 0 if self._round_robin else replica.inflight
                if not choices or load < least:
                    choices, least = [replica], load
                elif load == least:
                    choices.append(replica)
        if not choices:
            return None
        self._turn = turn = self._turn + 1
        return choices[turn % len(choices)]

    def fit_for(self, model: str, tried: Collection[Replica] = ()) -> list[Replica]:
        """Those among which a policy chooses."""
        return [replica for replica in self.by_model.get(model, ()) if replica.fit and replica not in tried]

    def _out_of_turn(self, holders: Sequence[Replica], tried: Collection[Replica]) -> Replica | None:
        """One that is to be probed; or the least bad where none is fit."""
        out = [r for r in holders if r.up and r.breaker.out and r not in tried]
        if not tried:  # a request that has failed once had better go where it works
            for replica in out:
                if replica.breaker.due:
                    return replica
        if not out or any(r.fit and r not in tried for r in holders):
            return None
        return min(out, key=lambda r: (r.breaker.trips, r.inflight))

    # -- what follows from it

    def _make(self, url: EngineUrl) -> Replica:
        pool = EnginePool(url.host, url.port, tls=url.scheme == "https")
        replica = Replica(url, pool, Breaker(self._limits, self._clock))
        self._metrics.replica_up.labels(replica.name).set(0)
        self._metrics.breaker_open.labels(replica.name).set(0)
        self._metrics.inflight.labels(replica.name).set_function(lambda: replica.inflight)
        self._metrics.hits_missing.labels(replica.name).set_function(lambda: replica.prediction.missing)
        return replica

    def _closed(self, replica: Replica) -> None:
        self._out -= 1
        logger.info("%s gets requests again", replica.name)
        self._weigh(replica)

    def _weigh(self, replica: Replica) -> None:
        """After its health or its breaker changed."""
        replica.fit = replica.up and not replica.breaker.out
        if replica.stage is not Stage.GONE:
            self._metrics.breaker_open.labels(replica.name).set(int(replica.breaker.out))
        self._count()

    def _index(self) -> None:
        """After the replicas or their models changed."""
        names = sorted({name for replica in self.all for name in replica.models})
        self.by_model = {name: [r for r in self.all if name in r.models] for name in names}
        # The first base model names the pool, so that the name stays while adapters come and go
        names.sort(key=lambda name: self.by_model[name][0].models[name].get("parent") is not None)
        pools: dict[tuple[Replica, ...], str] = {}
        self._pools = {name: pools.setdefault(tuple(self.by_model[name]), name) for name in names}
        self._count()

    def _count(self) -> None:
        self._total = self._max_inflight * _usable(self.all)
        self._capacity = {name: self._max_inflight * _usable(group) for name, group in self.by_model.items()}
        self.on_capacity()


def _usable(replicas: Sequence[Replica]) -> int:
    return sum(r.fit for r in replicas) or sum(r.up for r in replicas)
