"""`kvgate loadtest run`: measure what prefix caching gains on an engine that is already there."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from kvgate.errors import UsageError
from loadtest import report, result, table
from loadtest.arms import ARMS, blocks_of
from loadtest.client import Target
from loadtest.limits import Limits
from loadtest.outcome import Arm
from loadtest.plan import Plan, Shape, make_plan
from loadtest.planfile import read_plan, write_plan
from loadtest.progress import Progress
from loadtest.run import Runner
from loadtest.schedule import ClosedLoop, Load, OpenLoop
from loadtest.vocabulary import Vocabulary


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("loadtest", help="measure what prefix caching gains, or say that it cannot be told")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    run_parser = actions.add_parser(
        "run",
        help="run a shared-prefix workload with prefix caching off and on",
        description="Exit 0 when the result is VALID, 1 when it is INVALID, 2 when the call or the set-up is wrong.",
        allow_abbrev=False,
    )
    _target_flags(run_parser)
    _workload_flags(run_parser)
    _limit_flags(run_parser)
    run_parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    arms = _arms(args.arms)
    try:
        blocks = blocks_of(arms, args.order)
    except ValueError as error:
        raise UsageError(f"--order {args.order}: {error}") from error
    plan = read_plan(args.plan) if args.plan else _plan(args)
    target = Target(args.url, args.model, os.environ.get(args.api_key_env), args.timeout)
    limits = Limits(args.max_send_lag_ms, args.max_loop_lag_ms, args.max_error_rate, args.min_offered)
    runner = Runner(
        plan,
        target,
        engine_metrics=args.engine_metrics,
        engine_url=args.engine_url,
        blocks=blocks,
        progress=Progress.on_stderr(),
    )
    return execute(runner, plan, limits, args.out, as_json=args.json)


def execute(runner: Runner, plan: Plan, limits: Limits, out: Path, *, as_json: bool) -> int:
    """Run, judge, and write plan.jsonl, samples.jsonl, result.json and report.html into `out`. Returns the exit code."""
    try:
        write_plan(plan, out / "plan.jsonl")
        for name in ("samples.jsonl", "result.json", "report.html"):
            # a run that ends early must not leave an older one's verdict behind
            (out / name).unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(out, error) from None
    started = datetime.now(UTC)
    done = asyncio.run(runner.run())
    document = result.build(done, limits, started)
    (out / "samples.jsonl").write_bytes(result.samples_bytes(done))
    (out / "result.json").write_bytes(result.to_bytes(document))
    (out / "report.html").write_text(report.render(document, done), encoding="utf-8")
    if as_json:
        sys.stdout.buffer.write(result.to_bytes(document))
        sys.stdout.buffer.flush()
    else:
        print(table.render(document))
        print(f"\n{out / 'report.html'}")
    return 0 if document["valid"] else 1


def make_folder(out: Path) -> None:
    """Of the results. Raises UsageError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(out, error) from None


def _unwritable(out: Path, error: OSError) -> UsageError:
    return UsageError(f"--out {out} cannot be written ({error.strerror}): name a folder of yours")


def _target_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", type=_url, required=True, help="gateway or engine, such as http://127.0.0.1:8000")
    add("--model", help="model to ask for; default: the only one that is served")
    add(
        "--engine-metrics",
        type=_url,
        action="append",
        default=[],
        metavar="URL",
        help="metrics page of the engine itself, once for each engine: http://127.0.0.1:8001/metrics",
    )
    add("--engine-url", type=_url, help="engine, for its version; default: that of the first --engine-metrics")
    add("--api-key-env", default="KVGATE_API_KEY", metavar="NAME", help="environment variable that holds the key")
    add("--timeout", type=_positive, default=600.0, metavar="S", help="seconds for one answer (default: 600)")
    add("--out", type=Path, default=Path("out/loadtest"), help="folder of the results (default: out/loadtest)")
    add("--json", action="store_true", help="print the result as one JSON document")


def _workload_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--plan", type=Path, metavar="FILE", help="replay a plan.jsonl; the flags below are then not looked at")
    add("--seed", type=_count0, default=0, help="of prompts and arrivals (default: 0); salts are random in any case")
    add(
        "--vocab",
        type=_vocabulary,
        default=Vocabulary(),
        metavar="LOW:HIGH",
        help="token ids to draw from (default: 1000:30000, plain in common vocabularies)",
    )
    add("--groups", type=_count, default=2, help="prefixes (default: 2)")
    add("--sessions", type=_count, default=20, help="sessions that share a prefix (default: 20)")
    add("--turns", type=_count, default=1, help="turns of a session (default: 1)")
    add("--prefix-tokens", type=_count, default=2048, help="length of a shared prefix (default: 2048)")
    add("--suffix-tokens", type=_count, default=32, help="new tokens of a turn (default: 32)")
    add("--output-tokens", type=_count, default=32, help="tokens of an answer, exact (default: 32)")
    add("--concurrency", type=_count, default=8, help="closed loop: requests in flight (default: 8)")
    add("--rate", type=_positive, help="open loop instead: requests a second")
    add("--arrivals", choices=("poisson", "constant"), default="poisson", help="open loop: gaps (default: poisson)")
    add("--arms", default="off,on", help="off, on, or both (default: off,on)")
    add("--order", default="ABBA", help="order of the arms' blocks of time; A is the first arm (default: ABBA)")
    add("--unloaded-pairs", type=_count0, default=5, help="cold and warm pairs, one at a time; 0 = none (default: 5)")
    add("--unloaded-prefix-tokens", type=_count, default=3008, help="their shared prefix (default: 3008)")
    add("--unloaded-output-tokens", type=_count, default=8, help="their answers (default: 8)")


def _limit_flags(parser: argparse.ArgumentParser) -> None:
    add, limits = parser.add_argument, Limits()
    add("--max-send-lag-ms", type=_positive, default=limits.send_lag_ms, help="INVALID above, p99 (default: 50)")
    add("--max-loop-lag-ms", type=_positive, default=limits.loop_lag_ms, help="INVALID above, p99 (default: 50)")
    add("--max-error-rate", type=_share, default=limits.error_rate, help="INVALID above (default: 0.01)")
    add("--min-offered", type=_share, default=limits.offered, help="open loop: INVALID below (default: 0.99)")


def _plan(args: argparse.Namespace) -> Plan:
    load: Load = ClosedLoop(args.concurrency) if args.rate is None else OpenLoop(args.arrivals, args.rate)
    loaded = Shape(args.groups, args.sessions, args.turns, args.prefix_tokens, args.suffix_tokens, args.output_tokens)
    unloaded = Shape(
        1, args.unloaded_pairs, 1, args.unloaded_prefix_tokens, args.suffix_tokens, args.unloaded_output_tokens
    )
    return make_plan(
        seed=args.seed,
        load=load,
        unloaded=unloaded if args.unloaded_pairs else None,
        loaded=loaded,
        vocabulary=args.vocab,
    )


def _arms(text: str) -> tuple[Arm, ...]:
    names = text.split(",")
    chosen = tuple(arm for name in names for arm in ARMS if arm == name)
    if len(chosen) != len(names) or len(set(chosen)) != len(chosen):
        raise UsageError(f"--arms {text}: give off, on, or both with a comma")
    return chosen


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise argparse.ArgumentTypeError(f"{text!r} is not an http:// or https:// address")
    return text.rstrip("/").removesuffix("/v1")


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def _positive(text: str) -> float:
    if not (value := _number(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _share(text: str) -> float:
    if not 0 <= (value := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _count0(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _count(text: str) -> int:
    if not (value := _count0(text)):
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _vocabulary(text: str) -> Vocabulary:
    try:
        return Vocabulary.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
