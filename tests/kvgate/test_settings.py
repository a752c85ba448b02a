"""One table: the dataclass, the command line and the environment agree with it, and a wrong value names its source."""

import argparse
from dataclasses import fields

import pytest

from kvgate.commands import serve
from kvgate.errors import UsageError
from kvgate.settings import BY_NAME, SETTINGS, Settings


def parse(*argv: str) -> Settings:
    parser = argparse.ArgumentParser()
    serve.add_settings(parser)
    return serve.read_settings(parser.parse_args(argv))


def test_the_table_is_the_dataclass() -> None:
    assert {s.name: s.default for s in SETTINGS} == {f.name: f.default for f in fields(Settings)}
    assert all(type(s.default) is s.kind for s in SETTINGS)


def test_the_command_line_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGATE_PORT", "9001")
    monkeypatch.setenv("KVGATE_IDLE_TIMEOUT", "7.5")
    assert (parse().port, parse().idle_timeout) == (9001, 7.5)
    assert parse("--port", "9002").port == 9002


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--port", "http"), "--port: 'http' is not a whole number"),
        (("--port", "-1"), "--port: -1 is below the minimum of 0"),
        (("--port", "70000"), "--port: 70000 is above the maximum of 65535"),
        (("--idle-timeout", "nan"), "--idle-timeout: nan is below"),
        (("--idle-timeout", "inf"), "--idle-timeout: inf is above"),
        (("--host", "0.0.0.0"), "--insecure-no-auth"),
        (("--host", "example.org"), "--insecure-no-auth"),
    ],
)
def test_a_wrong_value_names_the_flag_and_the_fix(argv: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says.replace("(", r"\(")):
        parse(*argv)


def test_a_wrong_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGATE_PORT", "")
    with pytest.raises(UsageError, match="KVGATE_PORT: '' is not a whole number"):
        parse()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert parse("--host", host).host == host


def test_an_open_bind_has_to_be_said() -> None:
    assert parse("--host", "0.0.0.0", "--insecure-no-auth").host == "0.0.0.0"


def test_names_of_flags_and_variables() -> None:
    assert (BY_NAME["max_body_bytes"].flag, BY_NAME["max_body_bytes"].env) == (
        "--max-body-bytes",
        "KVGATE_MAX_BODY_BYTES",
    )
