"""The arithmetic of the benchmark and the shapes of its bytes: no load, no timing."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import __main__ as command
from bench import cpu, debian, faults, nginx, payloads, peers, report, streams, wrk
from bench.pacer import chunked_stream
from bench.phases import PHASES, Effort, Sample
from bench.process import ROOT
from bench.rounds import Outcome, Series, settled
from bench.stats import Bar, Spread, cpu_us, differences, percentile, ratios
from bench.suites import OVERHEAD, PEER, PEERS, SUITES
from kvgate.errors import SetupError, UsageError

TICK = 1 / os.sysconf("SC_CLK_TCK")


def stat_line(pid: int, parent: int, ticks: tuple[int, int, int, int], name: str = "x") -> str:
    return f"{pid} ({name}) S {parent} 1 1 0 -1 4194560 9 9 0 0 {' '.join(map(str, ticks))} 20 0 1 0 100 1 1"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    lines = {
        10: stat_line(10, 1, (100, 20, 3, 4), "a) S 1 (b"),
        11: stat_line(11, 10, (5, 5, 0, 0)),
        12: stat_line(12, 11, (1, 0, 0, 0)),
        20: stat_line(20, 1, (1000, 1000, 0, 0)),
    }
    for pid, line in lines.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(line)
        (tmp_path / str(pid) / "statm").write_text("500 100 50 1 0 10 0")
    (tmp_path / "30").mkdir()  # ended between listing and reading
    (tmp_path / "stat").write_text("cpu 9 9 9 9 9 9 9 9 0 0\ncpu0 1 2 3 400 50 6 7 8 0 0\ncpu1 1 0 0 0 0 0 0 0 0 0\n")
    return tmp_path


def test_cpu_of_a_tree_counts_descendants_and_reaped_children(proc: Path) -> None:
    assert cpu.tree(10, cpu.processes(proc)) == {10, 11, 12}
    assert cpu.tree_cpu_seconds(10, proc) == pytest.approx((127 + 10 + 1) * TICK)
    assert cpu.tree_cpu_seconds(99, proc) == 0
    assert cpu.tree_rss_mb(10, proc) == pytest.approx(300 * os.sysconf("SC_PAGE_SIZE") / 1e6)


def test_core_time_leaves_out_idling(proc: Path) -> None:
    assert cpu.core_busy_seconds(0, proc) == pytest.approx(27 * TICK)
    with pytest.raises(ValueError, match="no core 7"):
        cpu.core_busy_seconds(7, proc)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_cpu_of_a_real_child_is_seen_in_its_parents_tree() -> None:
    before = cpu.tree_cpu_seconds(os.getpid())
    work = "import time\nwhile time.process_time() < 0.2: pass"
    subprocess.run([sys.executable, "-c", work], check=True, timeout=30)
    assert cpu.tree_cpu_seconds(os.getpid()) - before >= 0.2 - 2 * TICK


def test_percentiles_are_nearest_rank() -> None:
    hundred = [float(n) for n in range(1, 101)]
    assert [percentile(hundred, p) for p in (0, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([7.0], 99) == 7
    assert percentile([], 50) is None


def test_spread_needs_every_round() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([1.0, 4.0]) == Spread(2.5, 1.0, 4.0)
    assert Spread.of([1.0, None]) is None
    assert Spread.of([]) is None


def test_cost_ratio_and_difference() -> None:
    assert cpu_us(2.0, 100_000) == pytest.approx(20)
    assert cpu_us(2.0, 0) is None
    assert cpu_us(-0.1, 5) is None
    assert ratios([30.0, 20.0, None, 1.0], [10.0, 10.0, 1.0, 0.0]) == [3.0, 2.0, None, None]
    assert differences([1.5, None], [1.0, 1.0]) == [0.5, None]


@pytest.mark.parametrize(
    ("values", "faults", "verdict"),
    [
        ([75.0, 70.0, 900.0], [], "pass"),
        ([76.0, 75.1, 10.0], [], "fail"),
        ([10.0, 10.0, 10.0], ["kvgate round 1: 1 x status error"], "INVALID"),
        ([10.0, None, 10.0], [], "INVALID"),
        ([10.0, 10.0], [], "INVALID"),
    ],
)
def test_verdict(values: list[float | None], faults: list[str], verdict: str) -> None:
    judged = Bar("CPU", "small", 7.5).judge(values, [10.0, 10.0, 10.0], faults)
    assert judged.verdict == verdict
    assert str(judged).startswith(f"{verdict}: CPU, small: ")


@pytest.mark.parametrize(("ours", "verdict"), [(25.0, "pass"), (32.9, "pass"), (33.0, "fail")])
def test_a_difference_under_the_tie_is_none(ours: float, verdict: str) -> None:
    judged = Bar("CPU", "streams", 1.0, tie=8.0).judge([ours] * 3, [25.0] * 3, [])
    assert judged.verdict == verdict
    assert judged.reasons == (("a difference under 8 µs is a tie",) if ours == 32.9 else ())


def outcome(cost: float, faults: list[str] | None = None) -> Outcome:
    phases = dict.fromkeys(bar.phase for bar in OVERHEAD.bars)
    figures: dict[str, float | None] = {"cpu_us": 10.0, "ttft_p50_ms": 1.0, "ttft_p99_ms": 2.0, "others_cpu_share": 0.1}
    result = Outcome()
    for phase in phases:
        result.series[phase] = {
            "direct": Series([Sample(figures | {"cpu_us": None}) for _ in range(3)]),
            "nginx": Series([Sample(figures) for _ in range(3)]),
            "kvgate": Series([Sample(figures | {"cpu_us": cost, "ttft_p50_ms": 1.5}) for _ in range(3)]),
        }
    result.series["streams-c100"]["kvgate"].samples[1].faults.extend(faults or [])
    return result


ENVIRONMENT = {
    "commit": "abcdef0123456789",
    "dirty": True,
    "date": "2026-01-01T00:00:00+00:00",
    "cpu": "a CPU",
    "cores": 2,
    "kernel": "Linux",
    "load_average_at_start": 0.0,
    "versions": {"nginx": "1.22.1"},
}


@pytest.mark.parametrize(
    ("cost", "faults", "expected"),
    [(20.0, [], "pass"), (50.0, [], "fail"), (20.0, ["1 x content"], "INVALID"), (80.0, ["1 x content"], "INVALID")],
)
def test_document_and_page_say_the_same(cost: float, faults: list[str], expected: str) -> None:
    result, effort = outcome(cost, faults), Effort(3, 1, 1)
    judged = result.judge(OVERHEAD.bars)
    assert len(judged) == len(OVERHEAD.bars)
    document = report.document(OVERHEAD, result, judged, effort, ENVIRONMENT)
    assert document["verdict"] == expected
    assert document["phases"]["streams-c100"]["kvgate"]["summary"]["added_ttft_p50_ms"]["median"] == 0.5
    assert json.loads(json.dumps(document)) == document
    page = report.markdown(OVERHEAD, result, judged, effort, ENVIRONMENT)
    assert "`abcdef012345` with uncommitted changes" in page
    assert f"| CPU per chunk | streams-c100 | nginx | {cost / 10:.2f}" in page
    assert all(fault in page for fault in faults)


def test_a_bar_is_judged_only_where_both_sides_ran() -> None:
    result = outcome(20.0)
    del result.series["small-c1"]["kvgate"]
    assert [j.bar.phase for j in result.judge(OVERHEAD.bars)] == ["small-c16", "small-c64", "streams-c100"]
    assert report.verdict([]) == "none"


def test_a_peer_that_did_not_start_is_reported_and_leaves_its_bar_undecided() -> None:
    sample = Sample({"cpu_us": 10.0, "ttft_p50_ms": 1.0})
    result = Outcome()
    for phase in PEERS.phases:
        result.series[phase] = {"kvgate/round-robin": Series([sample])}
        result.absent[phase] = {PEER: "ended with\nexit code 1"}
    judged = result.judge(PEERS.bars)
    assert {(j.verdict, j.reasons) for j in judged} == {("INVALID", (f"{PEER} did not start",))}
    document = report.document(PEERS, result, judged, Effort(1, 1, 1), ENVIRONMENT)
    assert document["did_not_start"]["large-c16"] == {PEER: "ended with\nexit code 1"}
    assert f"**{PEER}** did not start: ended with exit code 1" in report.markdown(
        PEERS, result, judged, Effort(1, 1, 1), ENVIRONMENT
    )


def test_a_peer_without_an_environment_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    peer = peers.launches()["smg/round_robin"](tmp_path / "run", 0)
    with pytest.raises(SetupError, match=r"smg is not installed\. Run scripts/setup-peers smg"):
        peer.start([1, 2])
    (tmp_path / "smg.log").write_text("WARNING: noise\nERROR: no match\nsetup-peers: installing failed\n")
    with pytest.raises(SetupError, match=r"is not installed\. setup-peers: installing failed: see .*/smg\.log"):
        peer.start([1, 2])


def test_what_ours_does_with_failing_engines_decides_and_what_peers_do_does_not() -> None:
    good, bad = faults.Finding("20 of 20 answered", True), faults.Finding("0 of 20 answered", False)
    check = next(iter(faults.CHECKS))
    ours = str(PEERS.faulted)
    result = Outcome(findings={ours: {check: good}, PEER: {check: bad}, "smg/round_robin": {}})
    assert faults.shortfalls(result.findings, ours) == []
    page = report.markdown(PEERS, result, [], Effort(1, 1, 1), ENVIRONMENT)
    assert f"| {PEER} | **0 of 20 answered** | did not start |" in page
    result.findings[ours][check] = bad
    document = report.document(PEERS, result, [], Effort(1, 1, 1), ENVIRONMENT)
    assert document["verdict"] == "fail"
    assert document["faults"][ours][check] == {"seen": "0 of 20 answered", "ok": False}


def test_every_peer_has_its_lock() -> None:
    locks = {path.stem for path in ROOT.glob("requirements/bench/*.lock")}
    assert locks == {path.stem for path in ROOT.glob("requirements/bench/*.in")}
    assert locks == {kind.peer for kind, _ in peers.POLICIES}


def test_only_lateness_is_measured_again() -> None:
    def take(*samples: Sample) -> Sample:
        left = list(samples)
        return settled(lambda: left.pop(0))

    late, failed = Sample({}, late=["late"]), Sample({}, faults=["failed"], late=["late"])
    assert take(late, Sample({})) == Sample({"retaken": 1})
    assert take(failed, Sample({})).faults == ["failed", "late"]
    assert take(*(Sample({}, late=["late"]) for _ in range(3))).faults == ["late"]


def test_bars_and_arguments_name_what_exists(tmp_path: Path) -> None:
    for suite in SUITES.values():
        assert {bar.phase for bar in suite.bars} <= set(suite.phases) <= {phase.name for phase in PHASES}
        assert {name for bar in suite.bars for name in (bar.target, bar.base)} <= set(suite.targets)
        assert suite.faulted is None or suite.faulted in suite.targets
        assert all(launch(tmp_path, 0).name == name for name, launch in suite.targets.items())
    assert OVERHEAD.out.name == "gateway-overhead.json"
    known = list(OVERHEAD.targets)
    assert command.chosen("nginx,kvgate", known, "targets") == ["nginx", "kvgate"]
    for wrong in ("apache", "", "nginx,apache"):
        with pytest.raises(UsageError, match="--targets"):
            command.chosen(wrong, known, "targets")


@pytest.mark.parametrize("size", [290, 32767])
def test_bodies_have_their_size_and_a_unique_end(size: int) -> None:
    template = payloads.request_template(size)
    first, second = payloads.filled(template, 1), payloads.filled(template, 1 + payloads.GROUPS)
    assert len(first) == len(second) == size
    assert first != second
    assert first[: size - 20] == second[: size - 20]
    assert json.loads(first)["model"] == payloads.MODEL
    assert template.count(payloads.GROUP) == template.count(payloads.SERIAL) == 1


def test_wrk_counts_statuses_as_failures() -> None:
    line = '{"requests":100,"duration_us":2000000,"connect":0,"read":1,"write":0,"status":4,"timeout":0,'
    load = wrk.Load.parse(line + '"p50_us":500,"p99_us":1500}')
    assert load == wrk.Load(96, 2.0, {"read": 1, "status": 4}, 0.5, 1.5)


def test_streams_are_checked_to_the_byte() -> None:
    raw = b"".join(chunked_stream())
    body = streams.body_of(raw)
    assert body == b"".join(payloads.stream_events())
    assert body.count(b"\n\n") == payloads.STREAM_CHUNKS + 2  # usage and [DONE] come with the last chunk
    assert body.endswith(b"data: [DONE]\n\n")
    with pytest.raises(streams.Broken, match="status"):
        streams.body_of(raw.replace(b" 200 ", b" 503 "))
    with pytest.raises(streams.Broken, match="framing"):
        streams.body_of(raw[:-7])


def test_a_stream_that_was_rewritten_is_known_by_its_text() -> None:
    sent = b"".join(payloads.stream_events())
    text = streams.text_of(sent)
    assert text is not None
    assert text.startswith(" word0 word1")
    rewritten = sent.replace(b'"logprobs":null,', b"")
    assert rewritten != sent
    assert streams.text_of(rewritten) == text
    for broken in (b"", sent.replace(b"data: [DONE]\n\n", b""), sent.replace(b'"choices"', b'"cho'), b"data: []\n\n"):
        assert streams.text_of(broken) is None


async def test_missing_and_wrong_streams_are_failures() -> None:
    raw = b"".join(chunked_stream())
    stream = streams.Stream(1, 0, 4, asyncio.get_running_loop().create_future())
    stream.answers += [raw, raw.replace(b"word7", b"w0rd7"), b"HTTP/1.1 502 Bad\r\n\r\n"]
    stream.reads = 64
    said = streams.summary([stream], 4)
    assert said["failures"] == {"content": 1, "status": 1, "unfinished": 1}
    assert (said["streams"], said["chunks"], said["reads_per_chunk"]) == (1, 64, 1.0)
    assert streams.summary([], 2)["reads_per_chunk"] is None


def test_nginx_writes_only_below_its_prefix(tmp_path: Path) -> None:
    for text in (nginx.proxy(tmp_path, 1234, [4321, 4322]), nginx.upstream(tmp_path, 1234)):
        assert "listen 127.0.0.1:1234 " in text
        assert "worker_processes 1;" in text
        paths = [line.split()[1] for line in text.splitlines() if "_path " in line or line.startswith("pid ")]
        assert len(paths) == 6
        assert all(path.startswith(str(tmp_path)) for path in paths)


def test_services_stay_down_only_while_installing(tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    with debian.no_services(policy):
        assert subprocess.run([policy], check=False).returncode == 101
    assert list(tmp_path.iterdir()) == []
    policy.write_text("an administrator's own")
    with debian.no_services(policy):
        assert policy.read_text() == "an administrator's own"
    assert policy.exists()


def test_a_missing_program_names_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(debian, "SEARCH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SetupError, match="apt-get install nginx-light"):
        debian.program("nginx")
    with pytest.raises(SetupError, match="sudo apt-get install nginx-light wrk"):
        debian.ensure(["nginx", "wrk"])
