"""The command line. Exit 0 ok, 1 findings or INVALID, 2 usage or set-up error."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from kvgate import __version__
from kvgate.errors import KvgateError

COMMANDS = ("demo", "up", "serve", "engine", "keys", "loadtest", "sim")


def build_parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser of these commands; each is imported for it."""
    parser = argparse.ArgumentParser(
        prog="kvgate", description="Serve an LLM with vLLM and see what prefix caching gains.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"kvgate {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in names:
        importlib.import_module(f"kvgate.commands.{name}").add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    named = argv[:1] if argv and argv[0] in COMMANDS else COMMANDS  # only what is called is imported: start-up counts
    args = build_parser(named).parse_args(argv)
    try:
        return int(args.run(args))
    except KvgateError as error:
        print(f"kvgate {args.command}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
