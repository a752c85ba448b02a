"""pytest tests/kvgate/test_keys_command.py: `kvgate keys` against the file that a gateway reads."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvgate.cli import build_parser
from kvgate.errors import UsageError
from server.tenants.keys import Identity, KeyFile


def keys(*words: str) -> int:
    args = build_parser(["keys"]).parse_args(["keys", *words])
    return int(args.run(args))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kvgate.keys"


def test_a_key_opens_the_gateway_until_it_is_revoked(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys("add", "--file", str(path), "--tenant", "acme", "--role", "operator", "--expires", "90d") == 0
    shown = capsys.readouterr()
    secret = shown.out.removesuffix("\n")
    assert len(secret) == 47
    assert secret[4:] not in shown.err + path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    in_force = KeyFile(path)
    identity = in_force.identify([(b"x-api-key", secret.encode())])
    assert isinstance(identity, Identity)
    assert (identity.tenant, identity.role) == ("acme", "operator")

    assert keys("list", "--file", str(path), "--json") == 0
    shown = capsys.readouterr()
    (key,) = json.loads(shown.out)["keys"]
    assert (key["id"], key["state"]) == (identity.key_id, "active")
    assert (datetime.fromisoformat(key["expires"]) - datetime.now(UTC)).days in (89, 90)
    assert "sha256" not in shown.out

    assert keys("revoke", "--file", str(path), "--id", identity.key_id) == 0
    assert capsys.readouterr().out == ""
    assert in_force.reload_if_changed()
    assert not isinstance(in_force.identify([(b"x-api-key", secret.encode())]), Identity)


def test_other_lines_stay_as_they_are(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = b'# mine\r\n  {"tenant":  "acme", "concurrency": 3, "note": "\\u00e9"}\n\n# the end, without a line\'s'
    path.write_bytes(before)
    path.chmod(0o640)
    keys("add", "--file", str(path), "--tenant", "acme", "--note", "build server")
    assert path.read_bytes().startswith(before + b"\n")
    assert path.stat().st_mode & 0o777 == 0o640
    keys("list", "--file", str(path))
    name = capsys.readouterr().out.splitlines()[-1].split()[0]
    keys("revoke", "--file", str(path), "--id", name)
    assert path.read_bytes() == before + b"\n"


def test_the_list_is_a_table(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = {"id": "old", "tenant": "acme", "sha256": "0" * 64, "expires": "2020-01-01T00:00:00Z"}
    path.write_text(json.dumps(line))
    keys("list", "--file", str(path))
    assert [row.split() for row in capsys.readouterr().out.splitlines()] == [
        ["id", "tenant", "role", "created", "expires", "state", "note"],
        ["old", "acme", "tenant", "-", "2020-01-01T00:00:00Z", "expired"],
    ]


def test_revoking_the_last_line_leaves_a_file_that_a_gateway_takes(path: Path) -> None:
    path.write_text(json.dumps({"id": "k-1", "tenant": "acme", "sha256": "0" * 64}))
    in_force = KeyFile(path)
    keys("revoke", "--file", str(path), "--id", "k-1")
    assert in_force.reload_if_changed()
    assert in_force.tenants == frozenset()


def test_a_link_stays_a_link_and_an_empty_file_is_begun(path: Path, tmp_path: Path) -> None:
    real = tmp_path / "elsewhere" / "keys"
    real.parent.mkdir()
    real.touch(0o600)
    path.symlink_to(real)
    keys("add", "--file", str(path), "--tenant", "acme")
    assert path.is_symlink()
    assert real.read_text().startswith("# ")
    assert [entry.name for entry in real.parent.iterdir()] == ["keys"]


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["add", "--tenant", "a b"], "--tenant must be a name of up to 63"),
        (["add", "--tenant", "*"], "--tenant must be a name of up to 63"),
        (["add", "--tenant", "a", "--expires", "soon"], "--expires 'soon' is neither a span as 90d"),
        (["add", "--tenant", "a", "--expires", "2031-01-31"], "--expires '2031-01-31' does not say its zone"),
        (["add", "--tenant", "a", "--expires", "2020-01-31T00:00:00Z"], "--expires '2020-01-31T00:00:00Z' is past"),
        (["add", "--tenant", "a", "--expires", "999999w"], "--expires '999999w' is neither"),
        (["list"], "cannot be read: No such file"),
        (["revoke", "--id", "k-1"], "is not there"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(path: Path, words: list[str], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        keys(words[0], "--file", str(path), *words[1:])
    assert list(path.parent.iterdir()) == []


def test_a_broken_file_is_left_alone(path: Path) -> None:
    path.write_text("# one\n{}\n")
    for words in (["add", "--tenant", "a"], ["revoke", "--id", "k-1"], ["list"]):
        with pytest.raises(UsageError, match=r"kvgate\.keys:2: 'tenant' must be a name"):
            keys(words[0], "--file", str(path), *words[1:])
    assert path.read_text() == "# one\n{}\n"
    path.write_text("# one\n")
    with pytest.raises(UsageError, match=r"--id k-1: .* has no such key"):
        keys("revoke", "--file", str(path), "--id", "k-1")
    with pytest.raises(UsageError, match="No such file"):
        keys("add", "--file", str(path.parent / "none" / "keys"), "--tenant", "a")


def test_keys_that_are_added_at_once_are_all_kept(path: Path) -> None:
    program = "import sys; from tests.kvgate.test_keys_command import keys; sys.exit(keys(*sys.argv[1:]))"
    argv = [sys.executable, "-c", program, "add", "--file", str(path), "--tenant", "acme"]

    def add(_: int) -> str:
        done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
        return done.stdout.strip()

    with ThreadPoolExecutor() as pool:
        secrets = list(pool.map(add, range(8)))
    in_force = KeyFile(path)
    found = {in_force.identify([(b"x-api-key", secret.encode())]) for secret in secrets}
    assert len(found) == 8
    assert all(isinstance(identity, Identity) for identity in found)
