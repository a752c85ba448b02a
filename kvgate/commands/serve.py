"""`kvgate serve`: the gateway alone, in front of engines that run already."""

from __future__ import annotations

import argparse
import ipaddress
import os

from kvgate.errors import UsageError
from kvgate.settings import SETTINGS, Settings
from server.run import run_gateway

__all__ = ["add_parser", "add_settings", "read_settings", "run", "run_gateway"]

SETTINGS_GROUP = "settings of the gateway"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("serve", help="the gateway alone", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--engine",
        action="append",
        metavar="URL",
        help="an engine, e.g. http://127.0.0.1:8001, or all behind a name, dns://engines:8001; repeat for more "
        "(environment: KVGATE_ENGINES, separated by commas)",
    )
    add_settings(parser)
    parser.set_defaults(run=run)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """One option for each row of the settings table, and the switch that allows an open bind."""
    group = parser.add_argument_group(SETTINGS_GROUP)
    for setting in SETTINGS:
        text = f"{setting.help} (default {setting.default}; environment {setting.env})".replace("%", "%%")
        group.add_argument(setting.flag, metavar=setting.unit, help=text)
    group.add_argument(
        "--insecure-no-auth", action="store_true", help="serve without keys on an address that is not loopback"
    )


def read_settings(args: argparse.Namespace) -> Settings:
    """The settings that the arguments and the environment give; raises UsageError."""
    settings = Settings.load({setting.name: getattr(args, setting.name) for setting in SETTINGS})
    if not (args.insecure_no_auth or settings.key_file or is_loopback(settings.host)):
        raise UsageError(
            f"--host {settings.host} is not loopback and there are no keys: anyone who reaches it could use the engines. "
            "Give --key-file (kvgate keys add makes one), bind 127.0.0.1, or say --insecure-no-auth"
        )
    return settings


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def run(args: argparse.Namespace) -> int:
    engines = args.engine or [url.strip() for url in os.environ.get("KVGATE_ENGINES", "").split(",") if url.strip()]
    settings = read_settings(args)
    if not engines and not settings.engines_file:
        raise UsageError(
            "--engine is missing: give the URL of at least one vLLM engine, e.g. --engine http://127.0.0.1:8001"
        )
    return run_gateway(settings, engines)
