"""What requests count becomes families that Prometheus reads."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from server.metrics import GatewayMetrics
from server.usage import Usage


def samples(metrics: GatewayMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = generate_latest(metrics.registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_tenants_and_routes_are_summed_where_they_are_no_label() -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    for route in ("/a", "/b"):
        for tenant in ("x", "y"):
            series = metrics.series(route, "m", tenant)
            series.finished(200, 0.2)
            series.finished(200, 9999.0)
            series.ttft.observe(0.3)
            series.used(Usage(100, 5, 64))
            series.used(Usage(10, 1, None))
    found = samples(metrics)
    assert found["kvgate_requests_total", (("code", "200"), ("model", "m"), ("route", "/a"), ("tenant", "x"))] == 2
    duration = "kvgate_request_duration_seconds"
    by_route = (("model", "m"), ("route", "/a"))
    assert found[f"{duration}_count", by_route] == 4
    assert found[f"{duration}_sum", by_route] == 2 * (0.2 + 9999.0)
    assert found[f"{duration}_bucket", (("le", "0.1"), *by_route)] == 0
    assert found[f"{duration}_bucket", (("le", "0.25"), *by_route)] == 2
    assert found[f"{duration}_bucket", (("le", "1800.0"), *by_route)] == 2
    assert found[f"{duration}_bucket", (("le", "+Inf"), *by_route)] == 4
    assert found["kvgate_ttft_seconds_bucket", (("le", "0.3"), *by_route)] == 2  # an edge belongs to its bucket
    by_tenant = (("model", "m"), ("tenant", "x"))
    assert found["kvgate_prompt_tokens_total", (*by_tenant, ("usage", "known"))] == 200
    assert found["kvgate_prompt_tokens_total", (*by_tenant, ("usage", "unknown"))] == 20
    assert found["kvgate_prefix_tokens_total", (("model", "m"), ("stage", "delivered"), ("tenant", "x"))] == 128
    assert found["kvgate_output_tokens_total", by_tenant] == 12


def test_a_request_that_never_arrived_whole_has_no_duration() -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    metrics.series("/a", "m", "t").finished(499, None)
    assert samples(metrics)["kvgate_request_duration_seconds_count", (("model", "m"), ("route", "/a"))] == 0


def test_what_was_predicted_is_comparable_and_unknown_where_nothing_was_matched() -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    for tenant, matched in (("x", True), ("y", False)):
        series = metrics.series("/a", "m", tenant)
        series.finished(200, 0.2)
        series.used(Usage(100, 5, 64))
        series.used(Usage(50, 5, 32))
        if matched:
            series.matched, series.available, series.routed, series.matched_delivered = 100, 80, 70, 64
    found = samples(metrics)

    def stages(name: str, tenant: str) -> dict[str, float]:
        return {
            dict(labels)["stage"]: value
            for (family, labels), value in found.items()
            if family == name and dict(labels)["tenant"] == tenant
        }

    assert stages("kvgate_prefix_tokens_total", "x") == {"available": 80, "routed": 70, "delivered": 96}
    assert stages("kvgate_matched_tokens_total", "x") == {"prompt": 100, "delivered": 64}
    assert stages("kvgate_prefix_tokens_total", "y") == {"delivered": 96}
    assert stages("kvgate_matched_tokens_total", "y") == {}
