"""The pages of docs/ that are made from the code. `make docs` writes them; tests/docs holds them in step."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvgate.cli import build_parser
from kvgate.commands.serve import SETTINGS_GROUP
from kvgate.settings import SETTINGS, Settings
from server.gateway import Gateway
from server.replica import EngineUrl
from server.usage import Usage

FOLDER = Path(__file__).parent


def settings() -> str:
    """docs/settings.md"""
    rows = [f"| `{s.flag} {s.unit}` | `{s.env}` | `{s.default}` | {s.help} |" for s in SETTINGS]
    return "\n".join(
        (
            "# Settings of the gateway",
            "",
            "Made from the settings table by `make docs`. The command line comes before the environment, the environment before",
            "the default. A wrong value ends the start with exit code 2 and names its source.",
            "",
            "| option | environment | default | meaning |",
            "|---|---|---|---|",
            *rows,
            "",
            "`--insecure-no-auth` allows a bind that is not loopback although there are no keys.",
            "",
            "Engines are given by `--engine URL`, repeated, or by `KVGATE_ENGINES`, separated by commas.",
            "",
        )
    )


def metrics() -> str:
    """docs/metrics.md"""
    gateway = Gateway.build(Settings(), ["http://127.0.0.1:8001"], CollectorRegistry())
    gateway.replicas.reconcile([EngineUrl.parse("http://127.0.0.1:8001")])
    gateway.metrics.rejected("queue_full")
    series = gateway.metrics.series("/v1/completions", "model", "default")
    series.finished(200, 1.0)
    series.used(Usage(1, 1, 1))
    series.matched = 1
    gateway.metrics.prediction_error.labels("127.0.0.1:8001")
    gateway.metrics.retries.labels("127.0.0.1:8001")
    gateway.metrics.kv_utilization.labels("127.0.0.1:8001")
    gateway.metrics.kv_cached.labels("127.0.0.1:8001")
    gateway.metrics.kv_event_gaps.labels("127.0.0.1:8001")
    rows = []
    for family in sorted(gateway.metrics.registry.collect(), key=lambda f: f.name):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        rows.append(f"| `{name}` | {family.type} | {', '.join(labels) or '–'} | {family.documentation} |")
    return "\n".join(
        (
            "# Metrics of the gateway",
            "",
            "Made from the registry by `make docs`; `GET /metrics` serves them. Seconds, tokens and ratios from 0 to 1 are the",
            "units, as the names say. `model` is a served name or `other`, `replica` is `host:port` of an engine: no label takes",
            "a value that a client can invent.",
            "",
            "| metric | type | labels | meaning |",
            "|---|---|---|---|",
            *rows,
            "",
        )
    )


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in dict.fromkeys(action.choices.values()):
                yield from _parsers(sub)


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A row for each argument. (Not argparse's own help text: its layout differs between Python versions.)"""
    settings = {id(a) for g in parser._action_groups if g.title == SETTINGS_GROUP for a in g._group_actions}
    if settings:
        yield "| | all [settings of the gateway](settings.md) |"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction | argparse._HelpAction | argparse._VersionAction):
            continue
        if id(action) in settings:
            continue
        name = " ".join(filter(None, (", ".join(action.option_strings), _value(action))))
        text = (action.help or "") % {"default": action.default, "prog": parser.prog}
        yield f"| `{name}` | {text.replace('|', chr(92) + '|')} |"


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if isinstance(action.metavar, str):
        return action.metavar
    return " or ".join(map(str, action.choices)) if action.choices else action.dest.upper()


def commands() -> str:
    """docs/commands.md"""
    parts = [
        "# Commands",
        "",
        "Made from the command line by `make docs`. Exit code 0 is ok, 1 findings or INVALID, 2 a usage or set-up error.",
        "",
    ]
    for parser in _parsers(build_parser()):
        rows = list(_options(parser))
        parts += [f"## {parser.prog}", "", " ".join((parser.description or "").split()), ""]
        parts += ["| argument | meaning |", "|---|---|", *rows, ""] if rows else []
    return "\n".join(parts)


PAGES: dict[str, Callable[[], str]] = {"settings.md": settings, "metrics.md": metrics, "commands.md": commands}

if __name__ == "__main__":
    for name, render in PAGES.items():
        (FOLDER / name).write_text(render(), encoding="utf-8")
        print(f"docs/{name}", file=sys.stderr)  # noqa: T201
