"""For all tests: nothing is skipped in CI, so that a green run means that everything ran, and nothing depends on speed or luck.

Hypothesis draws anew in each run at home, and the same examples in every run of CI.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from typing import Any

import hypothesis
import pytest

# A run in the background of a shell inherits that Ctrl-C is ignored, and so would every process that a test starts
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


_NO_CLOCK: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("home", **_NO_CLOCK, print_blob=True)
hypothesis.settings.register_profile("ci", **_NO_CLOCK, derandomize=True)
hypothesis.settings.load_profile("ci" if in_ci() else "home")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that skips itself as a whole."""
    report = yield
    if in_ci() and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not allow: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that skips itself, or is marked so. An expected failure is no skip."""
    report = yield
    if in_ci() and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not allow: {report.longrepr}"
    return report
