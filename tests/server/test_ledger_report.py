"""The body of GET /kv/ledger: every prompt token that an engine reported is in one place of it, and only its tenant sees it."""

from server.ledger.report import ledger_report
from server.metrics import Series
from server.usage import Usage


def series(route: str, tenant: str) -> Series:
    """Four requests: one matched, two that were not, and one of which the engine did not say what came from its cache."""
    made = Series(route, "m", tenant)
    for usage in (Usage(100, 1, 64), Usage(30, 1, 0), Usage(20, 1, 16), Usage(7, 1, None)):
        made.used(usage)
    made.matched, made.available, made.routed, made.matched_delivered, made.in_flight = 100, 96, 80, 64, 16
    return made


EVERY = [series("/a", "x"), series("/b", "x"), series("/a", "y")]


def test_routes_are_summed_and_nothing_is_left_out() -> None:
    x, y = ledger_report(EVERY, 12.5)["rows"]
    assert (x["tenant"], y["tenant"]) == ("x", "y")
    assert x == {
        "model": "m",
        "tenant": "x",
        "prompt_tokens": 200,
        "available_tokens": 192,
        "routed_tokens": 160,
        "delivered_tokens": 128,
        "routing_loss_tokens": 32,
        "engine_loss_tokens": 32,
        "routed_behind_a_twin_tokens": 32,
        "unmatched_prompt_tokens": 100,
        "unreported_prompt_tokens": 14,
    }
    assert sum(x[f"{part}prompt_tokens"] for part in ("", "unmatched_", "unreported_")) == 2 * (100 + 30 + 20 + 7)


def test_a_tenant_sees_its_own_alone() -> None:
    report = ledger_report(EVERY, 12.5, "y")
    assert [row["tenant"] for row in report["rows"]] == ["y"]
    assert report["rows"][0]["prompt_tokens"] == 100


def test_who_asked_for_nothing_has_no_row() -> None:
    assert ledger_report([Series("/a", "m", "x")], 0.0)["rows"] == []


def test_without_a_ledger_all_is_unmatched() -> None:
    made = Series("/a", "m", "x")
    made.used(Usage(100, 1, 64))
    (row,) = ledger_report([made], 0.0)["rows"]
    assert (row["prompt_tokens"], row["unmatched_prompt_tokens"]) == (0, 100)
