"""`kvgate up`: engines and the gateway in the foreground. Ctrl-C drains the gateway, then stops the engines."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from urllib.parse import urlsplit

from kvgate.commands.engine import add_engine_flags, add_start_flags, engine_request
from kvgate.commands.interrupt import sigterm_interrupts
from kvgate.commands.serve import add_settings, read_settings, run_gateway
from kvgate.errors import SetupError, UsageError
from kvgate.settings import Settings
from server.engines.launch import RunningEngine, check_port
from server.engines.local import EngineRequest, start_engine
from server.engines.machine import share_of_cores, usable_cores
from server.engines.progress import StartProgress
from server.run import check_settings

LOOK_SECONDS = 0.5
MOST_ENGINES = 64


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "up", help="engine(s) and gateway in the foreground", description=__doc__, allow_abbrev=False
    )
    add_engine_flags(parser)
    parser.add_argument("--engines", metavar="N", default="1", help="how many; they share the cores (default 1)")
    parser.add_argument(
        "--engine-port", metavar="N", default="0", help="port of the first engine (default: a free one)"
    )
    add_start_flags(parser)
    add_settings(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settings = read_settings(args)
    requests = engine_requests(args)
    check_settings(settings)  # before half a minute of starting an engine
    if settings.port:
        check_port(settings.host, settings.port)
    with sigterm_interrupts(), ExitStack() as running:
        engines: list[RunningEngine] = []
        for number, request in enumerate(requests):
            progress = StartProgress(sys.stderr, "engine" if len(requests) == 1 else f"engine {number}")
            engine = start_engine(request, log_path=args.log, progress=progress, start_seconds=args.start_timeout)
            engines.append(running.enter_context(engine))
        status = _serve(settings, engines)
        print("kvgate up: stopping", file=sys.stderr)
        return status


def _serve(settings: Settings, engines: list[RunningEngine]) -> int:
    """The gateway until it is told to end. Raises SetupError where an engine ended before it."""
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(engines, over), name="engines", daemon=True)
    watcher.start()
    try:
        return run_gateway(_with_events(settings, engines), [engine.url for engine in engines])
    finally:
        over.set()
        watcher.join()
        dead = next((engine for engine in engines if not engine.alive()), None)
        if dead is not None:
            raise SetupError(f"the engine at {dead.url} ended by itself, {dead.exit_text()}")


def _with_events(settings: Settings, engines: list[RunningEngine]) -> Settings:
    """Where these engines publish is known: those of older vLLM versions could not be asked."""
    if settings.kv_events != "auto":
        return settings
    stated = [f"{urlsplit(engine.url).netloc}={engine.events.setting()}" for engine in engines if engine.events]
    return replace(settings, kv_events=",".join(stated) or "off")


def engine_requests(args: argparse.Namespace) -> list[EngineRequest]:
    """One request for each engine: ports in a row, and the cores divided among them."""
    count = int(args.engines) if args.engines.isascii() and args.engines.isdigit() else 0
    if not 1 <= count <= MOST_ENGINES:
        raise UsageError(f"--engines {args.engines}: give a number from 1 to {MOST_ENGINES}")
    if count > 1 and args.profile == "gpu":
        raise UsageError(
            "--engines: with profile gpu start each with `kvgate engine run` on its own device, then `kvgate serve`"
        )
    if count > 1 and (args.log is not None or args.kv_events_port is not None):
        raise UsageError("--log and --kv-events-port name one engine's: leave them out with --engines above 1")
    first = engine_request(args, args.engine_port, port_flag="--engine-port")
    cores = usable_cores()
    return [
        replace(first, port=first.port + i if first.port else 0, cores=share_of_cores(cores, i, count))
        for i in range(count)
    ]


def _watch(engines: list[RunningEngine], over: threading.Event) -> None:
    """Ends the gateway when an engine dies: in the foreground a person should learn of it at once."""
    while not over.wait(LOOK_SECONDS):
        if not all(engine.alive() for engine in engines):
            print("kvgate up: an engine ended by itself, stopping", file=sys.stderr)
            os.kill(os.getpid(), signal.SIGTERM)
            return
