"""python -m bench [overhead|peers|fleet|index|render|sim]: measures and writes the result.

Exit code 0 if every bar holds, 1 if one fails or is INVALID, 2 on set-up errors.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench import debian, environment, faults, index, peers, render, report, rounds
from bench.phases import PHASES, Bench, Effort
from bench.suites import OVERHEAD, PEERS, SUITES
from kvgate.errors import KvgateError, SetupError, UsageError

TOOLS = ("nginx", "wrk")
FAULTS = "faults"  # what --phases calls the checks with failing engines
FULL, QUICK = Effort(rounds=5, seconds=4, repeat=6), Effort(rounds=2, seconds=1, repeat=2)


def chosen(text: str, known: Sequence[str], what: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UsageError(f"--{what}: {', '.join(unknown) or 'nothing'} is not one of {', '.join(known)}")
    return names


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(
        prog="python -m bench", description="What the gateway costs, beside nginx and its peers."
    )
    parse.add_argument("suite", nargs="?", choices=sorted(SUITES), default=OVERHEAD.name, help="the table to measure")
    parse.add_argument("--quick", action="store_true", help="two short rounds, for a look; the ratios are rough")
    parse.add_argument("--out", type=Path, help="JSON file; the Markdown page lies beside it as .md")
    parse.add_argument("--targets", help="comma-separated; all of the suite's unless given")
    parse.add_argument("--phases", help="comma-separated; the suite's unless given")
    parse.add_argument("--rounds", type=int, help="rounds of each phase")
    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["index"]:  # no servers and no load: a table of its own
        return index.main(words[1:])
    if words[:1] == ["render"]:
        return render.main(words[1:])
    if words[:1] == ["fleet"]:
        from bench.fleet import command

        return command.main(words[1:])
    if words[:1] == ["sim"]:
        from bench import sim

        return sim.main(words[1:])
    given = parser().parse_args(words)
    suite = SUITES[given.suite]
    effort = QUICK if given.quick else FULL
    if given.rounds is not None:
        if given.rounds < 1:
            raise UsageError("--rounds: at least 1")
        effort = Effort(given.rounds, effort.seconds, effort.repeat)
    every = list(suite.targets)
    names = chosen(given.targets, every, "targets") if given.targets is not None else every
    targets = {name: suite.targets[name] for name in every if name in names}
    known = [*(p.name for p in PHASES), *([FAULTS] if suite.faulted else [])]
    wanted = chosen(given.phases, known, "phases") if given.phases is not None else [*suite.phases, FAULTS]
    phases = [p for p in PHASES if p.name in wanted]
    if not sys.platform.startswith("linux"):
        raise SetupError("The benchmark reads /proc and pins cores: it runs on Linux only.")
    load_core, gateway_core = environment.two_cores()
    debian.ensure(TOOLS)
    out: Path = given.out or suite.out
    page = out.with_suffix(".md")
    where = environment.describe(load_core, gateway_core, TOOLS, [out, page])
    if suite is PEERS:
        where["versions"] |= peers.versions()
    with tempfile.TemporaryDirectory(prefix="kvgate-bench-") as folder:
        bench = Bench(Path(folder), load_core, gateway_core)
        outcome = rounds.run(bench, phases, targets, suite.backends, effort, say)
        if suite.faulted and FAULTS in wanted:
            outcome.findings = faults.run(Path(folder) / FAULTS, (load_core, gateway_core), targets, say)
    judged, shortfalls = outcome.judge(suite.bars), faults.shortfalls(outcome.findings, suite.faulted)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report.document(suite, outcome, judged, effort, where), indent=1) + "\n")
    page.write_text(report.markdown(suite, outcome, judged, effort, where))
    for judgement in judged:
        print(judgement)
    for shortfall in shortfalls:
        print(f"fail: {shortfall}")
    say(f"wrote {out} and {page}")
    return 0 if report.verdict(judged, shortfalls) in ("pass", "none") else 1


def _terminated(signum: int, frame: object) -> None:
    """SIGTERM unwinds like Ctrl-C, so that nothing is left running."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    try:
        sys.exit(main())
    except KvgateError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("bench: interrupted, nothing written", file=sys.stderr)
        sys.exit(130)
