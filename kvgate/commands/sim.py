"""`kvgate sim`: simulated vLLM engines, one or many in one process, with a faithful prefix cache and time from a profile."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any

from kvgate.errors import UsageError
from loadtest.sim.asks import Model
from loadtest.sim.engine import Shape
from loadtest.sim.faults import HELP, Faults
from loadtest.sim.fleet import Fleet
from loadtest.sim.hashing import ALGORITHMS, Lora
from loadtest.sim.profile import GPUS, MODELS, Profile, given, presets
from loadtest.sim.replica import EventPlaces, SimSettings
from loadtest.sim.scheduler import Limits
from loadtest.sim.tokens import Language
from server.engines.quantities import parse_tokens

BLOCK_SIZE = 16
KV_TOKENS = 100_000
PREFILL_TOKENS_PER_S = 8000.0
DECODE_MS = 10.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("sim", help="simulated vLLM engines", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to bind; nothing asks for a key")
    add(
        "--port", metavar="N", type=int, default=9001, help="port of the first engine (default 9001); 0 takes free ones"
    )
    add("--replicas", metavar="N", type=int, default=1, help="how many, on ports that count up (default 1)")
    add(
        "--model",
        metavar="NAME_OR_FOLDER",
        default="sim",
        help="a model folder, for its tokenizer, chat template and context length; or any name, for a toy tokenizer "
        "(default sim)",
    )
    add("--served-model-name", metavar="NAME", help="what clients call it (default: the name, or the folder's)")
    add(
        "--lora",
        metavar="NAME=PATH",
        action="append",
        default=[],
        help="an adapter that is served too; repeat for more",
    )
    speed = parser.add_argument_group("cache and speed")
    add = speed.add_argument
    add(
        "--profile",
        metavar="NAME",
        help=f"cpu:smollm2, fitted to the CPU engine, or GPU:MODEL, an estimate from a roofline, with GPU one of "
        f"{', '.join(GPUS)} and MODEL one of {', '.join(MODELS)}; what is given beside it comes first",
    )
    add("--block-size", metavar="TOKENS", help=f"tokens in a KV block (default {BLOCK_SIZE}, or the profile's)")
    add("--kv-tokens", metavar="TOKENS", help=f"size of the KV cache (default {KV_TOKENS}, or the profile's)")
    add(
        "--prefill-tokens-per-s",
        metavar="RATE",
        type=float,
        help=f"prompt tokens computed in a second (default {PREFILL_TOKENS_PER_S:g})",
    )
    add("--decode-ms", metavar="MS", type=float, help=f"time of a step that computes no prompt (default {DECODE_MS:g})")
    add(
        "--max-model-len",
        metavar="TOKENS",
        help="longest prompt and answer together (default: what model and cache allow)",
    )
    add("--max-batched-tokens", metavar="TOKENS", help="tokens in one step (default 8192, or the profile's)")
    add("--max-seqs", metavar="N", help="requests that run at the same time (default 256, or the profile's)")
    add(
        "--answer-tokens",
        metavar="TOKENS",
        default="200",
        help="mean length of answers without ignore_eos (default 200)",
    )
    add("--no-prefix-caching", action="store_true", help="compute every prompt anew")
    add("--no-prompt-tokens-details", action="store_true", help="usage without cached_tokens, as is vLLM's default")
    add(
        "--hash",
        choices=tuple(ALGORITHMS),
        default="fast",
        help="of blocks: sha256 gives vLLM's own, which KV events name blocks by, for programs that compute them, too",
    )
    events = parser.add_argument_group(
        "KV events, which carry prompt tokens (default: none)"
    ).add_mutually_exclusive_group()
    events.add_argument(
        "--kv-events-port",
        metavar="N",
        type=int,
        help="the first engine publishes on TCP port N and replays on N+1, the next on N+2 and N+3",
    )
    events.add_argument(
        "--kv-events-dir", metavar="DIR", type=Path, help="Unix sockets kv-PORT.sock and replay-PORT.sock there"
    )
    faults = parser.add_argument_group("faults; POST /sim/faults sets them while it runs")
    faults.add_argument(
        "--fault",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help=f"one of {', '.join(name for name in HELP if name != 'restart_down_s')} (docs/sim.md); repeat for more",
    )
    faults.add_argument("--seed", metavar="N", type=int, default=0, help="what shares of faults are drawn from")
    parser.set_defaults(run=run)


def read_settings(args: argparse.Namespace) -> SimSettings:
    """Raises UsageError that names the flag."""
    if not 0 <= args.port <= 65535 or args.port + args.replicas > 65536:
        raise UsageError(f"--port {args.port}: {args.replicas} ports from there are not all between 1 and 65535")
    if args.replicas < 1:
        raise UsageError(f"--replicas {args.replicas}: give at least 1")
    language, name, root = read_model(args.model)
    shape = read_shape(args, language)
    name = args.served_model_name or name
    return SimSettings(
        shape=shape,
        model=Model(name, root, shape.max_model_len, _loras(args.lora)),
        language=language,
        host=args.host,
        port=args.port,
        replicas=args.replicas,
        details=not args.no_prompt_tokens_details,
        answer_tokens=parse_tokens(args.answer_tokens, "--answer-tokens"),
        faults=_faults(args.fault),
        seed=args.seed,
        events=_events(args),
    )


def read_model(model: str) -> tuple[Language, str, str]:
    """How it reads and writes, its name and its root."""
    if os.path.isdir(model):
        folder = Path(model).resolve()
        return Language.of_folder(folder), folder.name, str(folder)
    if model.startswith(("/", ".", "~")):
        raise UsageError(f"--model {model}: there is no such folder; a name without one gets the toy tokenizer")
    return Language.toy(), model, model


def read_shape(args: argparse.Namespace, language: Language) -> Shape:
    profile = _profile(args)
    block_size = _tokens(args.block_size, "--block-size") or profile.block_size or BLOCK_SIZE
    kv_tokens = _tokens(args.kv_tokens, "--kv-tokens") or profile.kv_tokens or KV_TOKENS
    blocks = kv_tokens // block_size
    room = (blocks - 1) * block_size  # one is the null block
    if room < 1:
        raise UsageError(f"--kv-tokens {kv_tokens}: give two blocks of {block_size} tokens or more")
    longest = _tokens(args.max_model_len, "--max-model-len")
    if longest and longest > room:
        raise UsageError(
            f"--max-model-len {longest} is more than the KV cache holds: give --kv-tokens {longest + block_size}"
        )
    limits = Limits(
        _tokens(args.max_batched_tokens, "--max-batched-tokens") or profile.max_batched_tokens or 8192,
        _tokens(args.max_seqs, "--max-seqs") or profile.max_seqs or 256,
    )
    return Shape(
        profile=profile,
        block_size=block_size,
        blocks=blocks,
        max_model_len=longest or min(room, language.max_model_len or room),
        limits=limits,
        prefix_caching=not args.no_prefix_caching,
        algorithm=args.hash,
    )


def _profile(args: argparse.Namespace) -> Profile:
    rate, decode = args.prefill_tokens_per_s, args.decode_ms
    for flag, value in (("--prefill-tokens-per-s", rate), ("--decode-ms", decode)):
        if value is not None and not 0 < value < 1e9:
            raise UsageError(f"{flag} {value:g}: give a positive number")
    if args.profile is None:
        return given(rate or PREFILL_TOKENS_PER_S, (decode or DECODE_MS) / 1000)
    profile = presets().get(args.profile)
    if profile is None:
        raise UsageError(
            f"--profile {args.profile}: there is none, or the model does not fit. Take {', '.join(presets())}"
        )
    return profile.at(rate, None if decode is None else decode / 1000)


def _tokens(text: str | None, flag: str) -> int | None:
    return None if text is None else parse_tokens(text, flag)


def _loras(pairs: list[str]) -> dict[str, Lora]:
    loras = {}
    for number, pair in enumerate(pairs, 1):
        name, found, path = pair.partition("=")
        if not (name and found and path):
            raise UsageError(f"--lora {pair}: give a name and a path, as in --lora style=/adapters/style")
        loras[name] = Lora(name, path, number)
    return loras


def _faults(pairs: list[str]) -> Faults:
    values: dict[str, Any] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        if name == "restart_down_s":
            raise UsageError(f"--fault {pair}: a restart is asked for while it runs, by POST /sim/faults")
        try:
            values[name] = json.loads(text)
        except ValueError:
            raise UsageError(f"--fault {pair}: give a number, as in --fault error_share=0.1") from None
    try:
        return Faults().changed(values)
    except ValueError as error:
        raise UsageError(f"--fault {error}") from None


def _events(args: argparse.Namespace) -> EventPlaces | None:
    if args.kv_events_port is not None:
        if not 1 <= args.kv_events_port <= 65536 - 2 * args.replicas:
            raise UsageError(f"--kv-events-port {args.kv_events_port}: {2 * args.replicas} ports from there are needed")
        return EventPlaces(port=args.kv_events_port)
    if args.kv_events_dir is None:
        return None
    folder: Path = args.kv_events_dir.absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat().st_mode
    except OSError as error:
        raise UsageError(f"--kv-events-dir {folder} cannot be used: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"--kv-events-dir {folder} is open to others, and events carry prompts: chmod 700 {folder}")
    return EventPlaces(folder=str(folder))


def run(args: argparse.Namespace) -> int:
    settings = read_settings(args)
    if sys.platform == "win32":
        runner = asyncio.Runner()
    else:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with runner:
        runner.run(serve(settings))
    return 0


async def serve(settings: SimSettings) -> None:
    """Until SIGINT or SIGTERM, or an engine ends by accident."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with Fleet(settings) as fleet:
        gc.collect()
        gc.freeze()  # as in the gateway: requests are freed by reference count
        gc.set_threshold(100_000, 50, 1000)
        print(f"sim: {describe(settings)}", file=sys.stderr)
        for replica in fleet.replicas:
            events = f", KV events at {replica.endpoints.publish}" if replica.endpoints else ""
            print(f"sim: {replica.url}{events}", file=sys.stderr, flush=True)
        ends = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(fleet.wait())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        ends[0].cancel()
        if ends[1].done():
            await ends[1]
        ends[1].cancel()


def describe(settings: SimSettings) -> str:
    shape = settings.shape
    return (
        f"{settings.replicas} × {settings.model.name}, {shape.blocks} KV blocks of {shape.block_size} tokens, "
        f"time from profile {shape.profile.name} ({shape.profile.kind})"
    )
