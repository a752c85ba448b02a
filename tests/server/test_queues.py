"""Models that different engines serve do not wait for each other; those of the same engines share their places."""

from __future__ import annotations

from server.queues import AdmissionQueues
from server.replicas import EngineUrl
from tests.server.clock import Clock
from tests.server.test_replicas import Fleet, url
from tests.server.test_waiting import Request


def test_a_crowd_for_one_model_does_not_keep_another_waiting() -> None:
    clock = Clock()
    capacity = {"a": 1, "b": 1}
    queues = AdmissionQueues(lambda pool: capacity.get(pool, 0), 10, 5.0, clock)
    assert queues.of("a").enter(Request("t"), "t")
    crowd = [Request("t") for _ in range(5)]
    assert not any(queues.of("a").enter(request, "t") for request in crowd)
    assert queues.of("b").enter(Request("t"), "t")
    assert (queues.running, queues.waiting) == (2, 5)
    clock.now += 2.0
    assert queues.oldest_age() == 2.0
    capacity["a"] = 2
    queues.fill()
    queues.of("a").release()
    assert [r.outcome for r in crowd] == ["running"] * 2 + [""] * 3
    clock.now += 3.0
    queues.expire()
    assert [r.outcome for r in crowd[2:]] == ["queue_timeout"] * 3


def test_a_pool_that_is_gone_is_dropped_once_it_is_idle() -> None:
    capacity, clock = {"a": 1}, Clock()
    queues = AdmissionQueues(lambda pool: capacity.get(pool, 0), 10, 5.0, clock)
    queue = queues.of("a")
    waits = Request("t")
    queue.enter(Request("t"), "t")
    queue.enter(waits, "t")
    capacity.clear()
    queues.expire()
    assert queues.of("a") is queue
    clock.now += 5.0
    queue.release()
    assert queues.of("a") is queue
    queues.expire()
    assert (waits.outcome, queues.waiting, queues.oldest_age()) == ("queue_timeout", 0, 0.0)
    queues.expire()
    assert queues.of("a") is not queue


def test_adapters_share_the_pool_of_their_model() -> None:
    fleet = Fleet(3)
    first, second, third = fleet.set.all
    base, adapter = {"id": "m", "parent": None}, {"id": "adapter", "parent": "m"}
    for replica in (first, second):
        fleet.set.learn(replica, {"m": base, "adapter": adapter})
    fleet.set.learn(third, {"other": {"id": "other"}})
    pools = {name: fleet.set.pool_of(name) for name in ("m", "adapter", "other", "unknown")}
    assert pools == {"m": "m", "adapter": "m", "other": "other", "unknown": "unknown"}
    assert (fleet.set.capacity("m"), fleet.set.capacity("other")) == (20, 10)
    fleet.set.learn(second, {"m": base})  # the adapter is on one of them only
    assert fleet.set.pool_of("adapter") == "adapter"
    fleet.set.reconcile([url(1), EngineUrl("http", "new", 1)])
    assert fleet.set.pool_of("adapter") == "m"
