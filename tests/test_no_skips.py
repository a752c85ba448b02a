"""pytest tests/test_no_skips.py: in CI a skip fails, whichever way it is written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SKIPS = {
    "call": "def test_it():\n    pytest.skip('no')",
    "mark": "@pytest.mark.skip\ndef test_it():\n    pass",
    "condition": "@pytest.mark.skipif(True, reason='no')\nclass TestIt:\n    def test_it(self):\n        pass",
    "fixture": "@pytest.fixture\ndef it():\n    pytest.skip('no')\n\ndef test_it(it):\n    pass",
    "module": "pytest.importorskip('a_module_that_nobody_has')",
}


def outcome(folder: Path, test: str, ci: str) -> str:
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(f"import pytest\n\ndef test_other():\n    pass\n\n{test}\n")
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    env = os.environ | {"CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins take seconds to load
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return {0: "passed", 1: "failed", 2: "failed"}[done.returncode]  # 2: a module could not be collected


@pytest.mark.parametrize("way", SKIPS)
def test_a_skip_fails_in_ci(tmp_path: Path, way: str) -> None:
    assert outcome(tmp_path, SKIPS[way], ci="true") == "failed"


def test_a_skip_is_allowed_at_home(tmp_path: Path) -> None:
    assert outcome(tmp_path, SKIPS["call"], ci="") == "passed"


def test_an_expected_failure_is_no_skip(tmp_path: Path) -> None:
    assert outcome(tmp_path, "@pytest.mark.xfail\ndef test_it():\n    assert False", ci="true") == "passed"
