"""The set of replicas: who is picked, who is left out and tried again, who comes and goes."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvgate.errors import UsageError
from server.breaker import BreakerLimits
from server.metrics import GatewayMetrics
from server.replicas import EngineUrl, Failure, Replica, ReplicaSet, Stage
from tests.server.clock import Clock

ENGINE_FAULTS = [Failure.LOST, Failure.STATUS, Failure.TIMEOUT]


def url(number: int) -> EngineUrl:
    return EngineUrl("http", f"10.0.0.{number}", 8000)


class Fleet:
    """Replicas 1 to `count`, all up and serving `m`."""

    def __init__(self, count: int, policy: str = "least-load") -> None:
        self.clock = Clock()
        self.metrics = GatewayMetrics(CollectorRegistry())
        urls = [url(n) for n in range(1, count + 1)]
        self.set = ReplicaSet(urls, policy, self.metrics, 10, BreakerLimits(wait=1.0), self.clock)
        self.come_up()

    def come_up(self) -> None:
        for replica in self.set.all:
            self.set.learn(replica, {"m": {"id": "m"}})
            self.set.mark(replica, up=True)

    def picked(self, count: int) -> list[str]:
        """The names of the next so many picks, each answered at once."""
        names = []
        for _ in range(count):
            replica = self.pick()
            self.set.succeeded(replica)
            names.append(replica.name)
        return names

    def pick(self, *tried: Replica) -> Replica:
        replica = self.set.pick("m", tried)
        assert replica is not None
        return replica

    def metric(self, name: str, replica: Replica) -> str | None:
        start = f'{name}{{replica="{replica.name}"}} '
        lines = generate_latest(self.metrics.registry).decode().splitlines()
        return next((line.removeprefix(start) for line in lines if line.startswith(start)), None)


@pytest.mark.parametrize("policy", ["least-load", "round-robin"])
def test_a_replica_that_cannot_be_reached_is_left_out_at_once(policy: str) -> None:
    fleet = Fleet(3, policy)
    dead = fleet.pick()
    fleet.set.failed(dead, Failure.CONNECT)
    names = fleet.picked(20)
    assert dead.name not in names
    assert {names.count(r.name) for r in fleet.set.all if r is not dead} == {10}
    assert fleet.metric("kvgate_breaker_open", dead) == "1.0"


def test_it_is_probed_by_one_request_and_comes_back() -> None:
    fleet = Fleet(2)
    dead = fleet.pick()
    fleet.set.failed(dead, Failure.CONNECT)
    fleet.clock.now += 1.0
    assert fleet.pick() is dead
    other = fleet.pick()
    assert other is not dead  # one probe at a time
    fleet.set.succeeded(other)
    fleet.set.began(dead)
    assert fleet.metric("kvgate_breaker_open", dead) == "0.0"
    assert fleet.picked(10).count(dead.name) == 5


def test_a_probe_that_fails_costs_one_request() -> None:
    fleet = Fleet(2)
    dead = fleet.pick()
    fleet.set.failed(dead, Failure.CONNECT)
    fleet.clock.now += 1.0
    probe = fleet.pick()
    fleet.set.failed(probe, Failure.CONNECT)
    assert dead.name not in fleet.picked(20)


@pytest.mark.parametrize("why", ENGINE_FAULTS)
def test_five_failures_in_a_row_leave_it_out(why: Failure) -> None:
    fleet = Fleet(2)
    bad = fleet.set.all[0]
    for _ in range(4):
        fleet.set.failed(bad, why)
    assert bad.fit
    fleet.set.failed(bad, why)
    assert bad.name not in fleet.picked(10)


@pytest.mark.parametrize("why", [Failure.CONNECT, *ENGINE_FAULTS])
def test_the_last_one_is_never_taken_out(why: Failure) -> None:
    fleet = Fleet(1)
    for _ in range(50):
        fleet.set.failed(fleet.pick(), why)
        fleet.clock.now += 0.01
    assert len(fleet.picked(10)) == 10
    assert fleet.set.all[0].fit


def test_if_all_are_out_the_least_bad_is_used() -> None:
    fleet = Fleet(2)
    worse, better = fleet.set.all
    fleet.set.failed(worse, Failure.CONNECT)
    fleet.clock.now += 1.0
    fleet.set.failed(fleet.pick(), Failure.CONNECT)  # the probe, too
    fleet.set.failed(better, Failure.CONNECT)
    first = fleet.pick()
    assert first is better
    assert fleet.pick(first) is worse  # for the retry there is the other
    assert fleet.set.pick("m", [better, worse]) is None


def test_requests_that_break_every_engine_do_not_take_the_gateway_down() -> None:
    """Each is answered 5xx, retried elsewhere, and answered 5xx again; innocent ones come between, and after."""
    fleet = Fleet(2)
    for _ in range(4):
        first = fleet.pick()
        fleet.set.failed(first, Failure.STATUS)
        second = fleet.pick(first)
        fleet.set.failed(second, Failure.STATUS, retry=True)
    assert all(r.fit for r in fleet.set.all)
    for _ in range(100):
        fleet.set.failed(fleet.pick(), Failure.STATUS)
        assert fleet.set.pick("m") is not None
    assert len(fleet.picked(10)) == 10


def test_what_a_retry_gets_is_not_held_against_its_replica() -> None:
    fleet = Fleet(2)
    first, second = fleet.set.all
    for _ in range(30):
        fleet.set.failed(first, Failure.STATUS)
        fleet.set.failed(second, Failure.STATUS, retry=True)
    assert (first.fit, second.fit) == (False, True)
    for _ in range(5):  # but a connection that breaks is
        fleet.set.failed(second, Failure.LOST, retry=True)
    assert not second.fit


def test_a_retry_does_not_probe() -> None:
    fleet = Fleet(3)
    dead, tried, good = fleet.set.all
    fleet.set.failed(dead, Failure.CONNECT)
    fleet.clock.now += 1.0
    assert fleet.pick(tried) is good


def test_a_probe_whose_client_left_is_followed_by_another() -> None:
    fleet = Fleet(2)
    dead = fleet.pick()
    fleet.set.failed(dead, Failure.CONNECT)
    fleet.clock.now += 1.0
    fleet.set.gave_up(fleet.pick())
    assert fleet.pick() is dead


def test_an_engine_that_comes_back_is_probed_without_a_wait() -> None:
    fleet = Fleet(2)
    dead = fleet.pick()
    fleet.set.failed(dead, Failure.CONNECT)
    fleet.set.mark(dead, up=False)
    fleet.clock.now += 60.0
    assert dead.name not in fleet.picked(10)  # not even as a probe
    fleet.clock.now -= 59.9  # long before its wait is over
    fleet.set.mark(dead, up=True)
    assert fleet.pick() is dead


def test_failures_ask_for_a_look_at_the_replica() -> None:
    fleet = Fleet(2)
    doubted: list[Replica] = []
    fleet.set.on_doubt = doubted.append
    bad = fleet.set.all[0]
    fleet.set.failed(bad, Failure.STATUS)  # it did answer
    assert doubted == []
    fleet.set.failed(bad, Failure.LOST)
    assert doubted == [bad]


def test_capacity_is_that_of_the_fit_ones() -> None:
    fleet = Fleet(3)
    risen: list[int] = []
    fleet.set.on_capacity = lambda: risen.append(fleet.set.capacity())
    first, second, third = fleet.set.all
    assert (fleet.set.capacity(), fleet.set.capacity("m"), fleet.set.capacity("x")) == (30, 30, 0)
    fleet.set.failed(first, Failure.CONNECT)
    assert fleet.set.capacity() == 20
    fleet.set.failed(second, Failure.CONNECT)
    fleet.set.failed(third, Failure.CONNECT)
    assert fleet.set.capacity("m") == 30  # none is fit: they are all used
    for replica in (first, second, third):
        fleet.set.mark(replica, up=False)
    assert fleet.set.capacity() == 0
    fleet.set.mark(first, up=True)
    assert fleet.set.capacity() == 10
    assert risen[-1] == 10


# -- coming and going


def test_a_new_one_is_added_and_gets_requests_once_it_is_up() -> None:
    fleet = Fleet(1)
    added: list[Replica] = []
    fleet.set.on_add = added.append
    fleet.set.reconcile([url(1), url(2)])
    assert [r.name for r in added] == ["10.0.0.2:8000"]
    assert fleet.metric("kvgate_replica_up", added[0]) == "0.0"
    assert set(fleet.picked(5)) == {"10.0.0.1:8000"}
    fleet.come_up()
    assert set(fleet.picked(6)) == {"10.0.0.1:8000", "10.0.0.2:8000"}
    fleet.set.reconcile([url(2), url(1)])
    assert len(added) == 1


def test_a_removed_one_drains_then_goes_with_its_series() -> None:
    fleet = Fleet(2)
    first, second = fleet.set.all
    second.inflight = 1
    fleet.metrics.retries.labels(second.name).inc()
    fleet.set.reconcile([url(1)])
    assert (second.stage, list(fleet.set.draining)) == (Stage.DRAINING, [second.name])
    assert set(fleet.picked(5)) == {first.name}
    assert fleet.set.capacity() == 10
    assert not fleet.set.forget(second)
    assert fleet.metric("kvgate_inflight_requests", second) == "1.0"
    second.inflight = 0
    assert fleet.set.forget(second)
    assert not fleet.set.forget(second)
    assert not fleet.set.draining
    assert second.name not in generate_latest(fleet.metrics.registry).decode()
    fleet.set.mark(second, up=not second.up)  # a check that was under way
    fleet.set.failed(second, Failure.CONNECT)
    fleet.set.succeeded(second)
    fleet.set.learn(second, {})
    assert second.name not in generate_latest(fleet.metrics.registry).decode()
    assert set(fleet.set.served) == {"m"}


def test_one_that_comes_back_while_it_drains_is_taken_back() -> None:
    fleet = Fleet(2)
    second = fleet.set.all[1]
    second.inflight = 1
    fleet.set.reconcile([url(1)])
    fleet.set.reconcile([url(1), url(2)])
    assert second in fleet.set.all
    assert second.stage is Stage.ACTIVE
    assert not fleet.set.forget(second)
    second.inflight = 0
    assert second.name in fleet.picked(4)


def test_an_open_breaker_goes_with_its_replica() -> None:
    fleet = Fleet(3)
    bad = fleet.set.all[2]
    fleet.set.failed(bad, Failure.CONNECT)
    fleet.set.reconcile([url(1), url(2)])
    assert fleet.set.forget(bad)
    assert fleet.set._out == 0
    fleet.set.reconcile([url(1), url(2), url(3)])
    fleet.come_up()
    assert fleet.metric("kvgate_breaker_open", fleet.set.all[2]) == "0.0"
    assert len(set(fleet.picked(9))) == 3


def test_the_same_name_with_another_scheme_waits_until_the_old_one_is_gone() -> None:
    fleet = Fleet(1)
    old = fleet.set.all[0]
    old.inflight = 1
    wanted = [EngineUrl("https", old.url.host, old.url.port)]
    fleet.set.reconcile(wanted)
    assert fleet.set.all == []
    old.inflight = 0
    fleet.set.forget(old)
    fleet.set.reconcile(wanted)
    assert [str(r.url) for r in fleet.set.all] == ["https://10.0.0.1:8000"]


def test_models_go_with_the_last_replica_that_serves_them() -> None:
    fleet = Fleet(2)
    fleet.set.learn(fleet.set.all[1], {"m": {"id": "m"}, "only-here": {"id": "only-here"}})
    assert set(fleet.set.served) == {"m", "only-here"}
    fleet.set.reconcile([url(1)])
    assert set(fleet.set.served) == {"m"}


@pytest.mark.parametrize(
    "text", ["http://", "ftp://h:1", "http://h:1/v1", "http://h:x", "http://user@h:1", "http://ü:1", "http://a b:1", ""]
)
def test_a_url_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^here: "):
        EngineUrl.parse(text, "here:")


def test_a_later_beginning_of_its_process_is_a_restart() -> None:
    fleet = Fleet(1)
    (replica,) = fleet.set.all
    restarts: list[Replica] = []
    fleet.set.on_restart = restarts.append
    for started in (100.0, None, 100.0, 90.0, 100.0):  # the page was not there; two engines behind one address
        fleet.set.dated(replica, started)
    assert restarts == []
    fleet.set.dated(replica, 200.0)
    assert restarts == [replica]
