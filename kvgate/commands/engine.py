"""`kvgate engine`: print the exact command of a vLLM engine, or run it until it is stopped."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

from kvgate.commands.interrupt import sigterm_interrupts
from kvgate.errors import SetupError, UsageError
from server.engines.local import EngineRequest, engine_spec, start_engine, vllm_program
from server.engines.profiles import PROFILES, EventEndpoints, engine_command
from server.engines.quantities import parse_bytes, parse_tokens

DEFAULT_PORT = 8001


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("engine", help="a vLLM engine: its exact command, or run it", description=__doc__)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text, run in (
        ("print", "print the command; it can be pasted into a shell", print_engine),
        ("run", "start it, wait until it serves, stop it on Ctrl-C", run_engine),
    ):
        action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        add_engine_flags(action)
        action.add_argument("--port", metavar="N", default=str(DEFAULT_PORT), help="port of the engine (default 8001)")
        action.add_argument("--host", default="127.0.0.1", help="address that the engine binds; it asks for no key")
        if name == "print":
            action.add_argument("--json", action="store_true", help="argv and env as one JSON document")
        else:
            add_start_flags(action)
        action.set_defaults(run=run)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """What `engine` and `up` share; ports and addresses are their own."""
    parser.add_argument(
        "--profile", choices=PROFILES, default="cpu", help="cpu: the embedded vLLM; gpu: `vllm` on the PATH"
    )
    parser.add_argument("--model", help="a model folder or a hub id (default: the embedded SmolLM2-135M)")
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="what clients call it (default: the model's own name)"
    )
    parser.add_argument("--max-model-len", metavar="TOKENS", help="longest prompt and answer together")
    parser.add_argument("--kv-memory", metavar="AMOUNT", help="KV cache memory, e.g. 1GiB (default on cpu: 1GiB)")
    parser.add_argument("--block-size", metavar="TOKENS", help="tokens in a KV block (default on cpu: 32)")
    parser.add_argument(
        "--kv-dtype", default="auto", help="element type of the KV cache, e.g. fp8 (default: the model's)"
    )
    parser.add_argument("--no-prefix-caching", action="store_true", help="for comparison: compute every prompt anew")
    parser.add_argument(
        "--kv-events-port",
        metavar="N",
        help="publish KV events, which carry prompt tokens, unguarded on TCP port N and replay on N+1 "
        "(default: Unix sockets that only you can open)",
    )
    parser.add_argument("extra", nargs="*", metavar="-- VLLM_ARGUMENT", help="further arguments for vLLM, after --")


def add_start_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log", metavar="FILE", type=Path, help="the engine's log (default: in your cache directory)")
    parser.add_argument("--start-timeout", metavar="SECONDS", type=_seconds, default=600.0, help="default 600")


def engine_request(
    args: argparse.Namespace, port: str, host: str = "127.0.0.1", port_flag: str = "--port"
) -> EngineRequest:
    """The parsed flags as a request. Raises UsageError that names the flag."""
    if args.profile == "gpu" and args.model is None:
        raise UsageError("--model is missing: profile gpu needs a model folder or a hub id, such as --model org/name")
    if args.extra and not args.extra[0].startswith("-"):
        raise UsageError(
            f"{args.extra[0]!r} is not a flag: vLLM's own arguments follow --, each beginning with its flag"
        )
    return EngineRequest(
        profile=args.profile,
        model=args.model,
        served_name=args.served_model_name,
        port=_port(port, port_flag),
        host=host,
        max_model_len=None if args.max_model_len is None else parse_tokens(args.max_model_len, "--max-model-len"),
        kv_bytes=None if args.kv_memory is None else parse_bytes(args.kv_memory, "--kv-memory"),
        block_size=None if args.block_size is None else parse_tokens(args.block_size, "--block-size"),
        kv_dtype=args.kv_dtype,
        prefix_caching=not args.no_prefix_caching,
        events_port=None if args.kv_events_port is None else _port(args.kv_events_port, "--kv-events-port"),
        extra=tuple(args.extra),
    )


def print_engine(args: argparse.Namespace) -> int:
    request = engine_request(args, args.port, args.host)
    program = vllm_program("cpu", os.environ) if request.profile == "cpu" else "vllm"
    spec = engine_spec(request, os.environ)
    folder = None
    if request.events_port is not None:
        spec = replace(spec, events=EventEndpoints.on_ports(request.events_port))
    elif request.prefix_caching:
        folder = f"/tmp/kvgate-{os.getuid()}-{spec.port}"  # noqa: S108 - made by the printed command, refused if another's
        spec = replace(spec, events=EventEndpoints.in_folder(folder))
    command = engine_command(spec, program)
    if args.json:
        document = {"argv": command.argv, "env": dict(command.env), "private_folder": folder}
        print(json.dumps(document, indent=2, sort_keys=True))
    else:
        if folder is not None:
            print(f"install -d -m 0700 {shlex.quote(folder)} &&")
        print(command.shell())
    return 0


def run_engine(args: argparse.Namespace) -> int:
    request = engine_request(args, args.port, args.host)
    with (
        sigterm_interrupts(),
        start_engine(request, log_path=args.log, start_seconds=args.start_timeout) as engine,
    ):
        try:
            print(f"engine: log {engine.log_path}; Ctrl-C stops it", file=sys.stderr)
            while engine.alive():
                time.sleep(0.5)
        except KeyboardInterrupt:
            print("engine: stopping", file=sys.stderr)
            return 0
        raise SetupError(f"the engine ended by itself, {engine.exit_text()}")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def _port(text: str, flag: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise UsageError(f"{flag} {text}: give a port number from 0 (a free one) to 65535")
    return int(text)
