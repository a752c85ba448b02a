"""python -m bench: measures, writes the result, exits 0 if every bar holds, 1 if one fails or is INVALID, 2 on set-up errors."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench import debian, environment, report, rounds
from bench.phases import PHASES, Bench, Effort
from bench.process import ROOT
from bench.targets import TARGETS
from kvgate.errors import KvgateError, SetupError, UsageError

TOOLS = ("nginx", "wrk")
FULL, QUICK = Effort(rounds=5, seconds=4, repeat=6), Effort(rounds=2, seconds=1, repeat=2)
OUT = ROOT / "docs" / "results" / "gateway-overhead.json"


def chosen(text: str, known: Sequence[str], what: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UsageError(f"--{what}: {', '.join(unknown) or 'nothing'} is not one of {', '.join(known)}")
    return names


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(prog="python -m bench", description="What the gateway costs, beside nginx.")
    parse.add_argument("--quick", action="store_true", help="about a minute, for a look; the ratios are rough")
    parse.add_argument("--out", type=Path, default=OUT, help="JSON file; the Markdown page lies beside it as .md")
    parse.add_argument("--targets", default=",".join(TARGETS), help="comma-separated")
    parse.add_argument("--phases", default=",".join(p.name for p in PHASES), help="comma-separated")
    parse.add_argument("--rounds", type=int, help="rounds of each phase")
    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    effort = QUICK if given.quick else FULL
    if given.rounds is not None:
        if given.rounds < 1:
            raise UsageError("--rounds: at least 1")
        effort = Effort(given.rounds, effort.seconds, effort.repeat)
    targets = [TARGETS[name] for name in chosen(given.targets, list(TARGETS), "targets")]
    names = chosen(given.phases, [p.name for p in PHASES], "phases")
    phases = [p for p in PHASES if p.name in names]
    if not sys.platform.startswith("linux"):
        raise SetupError("The benchmark reads /proc and pins cores: it runs on Linux only.")
    load_core, gateway_core = environment.two_cores()
    debian.ensure(TOOLS)
    out: Path = given.out
    page = out.with_suffix(".md")
    where = environment.describe(load_core, gateway_core, TOOLS, [out, page])
    with tempfile.TemporaryDirectory(prefix="kvgate-bench-") as folder:
        bench = Bench(Path(folder), load_core, gateway_core)
        outcome = rounds.run(bench, phases, targets, effort, lambda line: print(line, file=sys.stderr, flush=True))
    judged = outcome.judge()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report.document(outcome, judged, effort, where), indent=1) + "\n")
    page.write_text(report.markdown(outcome, judged, effort, where))
    for judgement in judged:
        print(judgement)
    print(f"wrote {out} and {page}", file=sys.stderr)
    return 0 if report.verdict(judged) in ("pass", "none") else 1


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
