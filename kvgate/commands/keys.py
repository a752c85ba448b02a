"""`kvgate keys`: make, list and revoke the keys of tenants and operators."""

from __future__ import annotations

import argparse
import json
import re
import secrets
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import orjson

from kvgate.errors import UsageError
from server.tenants.entries import KeyEntry, KeyFileContent, digest, new_secret, parse, timestamp
from server.tenants.files import changing
from server.tenants.keys import read_key_file

NEW_FILE = b"# Keys of kvgate, one a line; see docs/keys.md. Change it with `kvgate keys`, or replace it as a whole.\n"
_SPAN = re.compile(r"([1-9][0-9]{0,5})([mhdw])\Z")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("keys", help="keys of tenants and operators", description=__doc__, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text, run in (
        ("add", "make a key and print it, once; the file keeps its SHA-256 only", add),
        ("list", "show the keys, never their secrets", list_keys),
        ("revoke", "remove a key; running gateways refuse it within a second", revoke),
    ):
        action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        made = "; made if it is not there" if name == "add" else ""
        action.add_argument("--file", metavar="FILE", type=Path, required=True, help=f"the key file{made}")
        if name == "add":
            action.add_argument("--tenant", metavar="NAME", required=True, help="whose key it is")
            action.add_argument(
                "--role", choices=("tenant", "operator"), default="tenant", help="what it may see (default tenant)"
            )
            action.add_argument(
                "--expires", metavar="WHEN", help="a span as 90d (m, h, d, w), or a time as 2031-01-31T12:00:00Z"
            )
            action.add_argument("--note", metavar="TEXT", default="", help="what it is for; kept in the file")
        elif name == "list":
            action.add_argument("--json", action="store_true", help="one JSON document")
        else:
            action.add_argument("--id", metavar="ID", required=True, help="as `kvgate keys list` shows it")
        action.set_defaults(run=run)


def add(args: argparse.Namespace) -> int:
    now = datetime.now(UTC)
    expires = None if args.expires is None else _expiry(args.expires, now)
    secret = new_secret()
    with changing(args.file, new=NEW_FILE) as file:
        if not file.data.strip():
            file.data = NEW_FILE
        taken = {key.id for key in parse(file.data, str(args.file)).keys}
        name = next(name for name in iter(lambda: f"k-{secrets.token_hex(4)}", None) if name not in taken)
        key = KeyEntry(name, args.tenant, args.role, digest(secret.encode()), now, expires, args.note)
        line = key.line()
        try:
            parse(line, "--")  # what the file's reader refuses, an argument has brought in
        except UsageError as error:
            raise UsageError(str(error).removeprefix("--:1: ").replace("'tenant'", "--tenant", 1)) from None
        if not file.data.endswith(b"\n"):
            file.data += b"\n"
        file.data += line + b"\n"
    until = "without end" if expires is None else f"until {timestamp(expires)}"
    print(f"key {key.id}, {key.role} {key.tenant}, valid {until}. It is shown this once:", file=sys.stderr)
    print(secret)
    return 0


def list_keys(args: argparse.Namespace) -> int:
    _, content = read_key_file(args.file)
    now = datetime.now(UTC)
    if args.json:
        print(json.dumps(_document(content, now), indent=2, sort_keys=True))
        return 0
    rows = [("id", "tenant", "role", "created", "expires", "state", "note")]
    rows += [
        (key.id, key.tenant, key.role, _shown(key.created), _shown(key.expires), _state(key, now), key.note)
        for key in content.keys
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def revoke(args: argparse.Namespace) -> int:
    with changing(args.file) as file:
        parse(file.data, str(args.file))
        lines = file.data.split(b"\n")
        kept = [line for line in lines if not _is_key(line.strip(), args.id)]
        if len(kept) == len(lines):
            raise UsageError(f"--id {args.id}: {args.file} has no such key (see `kvgate keys list`)")
        # a file without keys must not look like one that was cut off: see `parse`
        rest = b"\n".join(kept)
        file.data = rest if rest.strip() else NEW_FILE
    print(f"key {args.id} is revoked", file=sys.stderr)
    return 0


def _is_key(line: bytes, name: str) -> bool:
    return bool(line) and not line.startswith(b"#") and orjson.loads(line).get("id") == name


def _expiry(text: str, now: datetime) -> datetime:
    span = _SPAN.match(text)
    try:
        if span is not None:
            return now + timedelta(**{_UNITS[span[2]]: int(span[1])})
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise UsageError(f"--expires {text!r} is neither a span as 90d nor a time as 2031-01-31T12:00:00Z") from None
    if moment.tzinfo is None:
        raise UsageError(f"--expires {text!r} does not say its zone: write 2031-01-31T12:00:00Z")
    if moment <= now:
        raise UsageError(f"--expires {text!r} is past")
    return moment


def _shown(moment: datetime | None) -> str:
    return "-" if moment is None else timestamp(moment)


def _state(key: KeyEntry, now: datetime) -> str:
    return "expired" if key.expires is not None and key.expires <= now else "active"


def _document(content: KeyFileContent, now: datetime) -> dict[str, object]:
    keys = [
        {
            "id": key.id,
            "tenant": key.tenant,
            "role": key.role,
            "created": None if key.created is None else timestamp(key.created),
            "expires": None if key.expires is None else timestamp(key.expires),
            "state": _state(key, now),
            "note": key.note,
        }
        for key in content.keys
    ]
    return {"keys": keys}
