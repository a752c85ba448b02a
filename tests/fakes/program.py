"""A Python script as an executable file, also where the interpreter's path has a space, which #! lines cannot hold."""

from __future__ import annotations

import shlex
import sys
import textwrap
from pathlib import Path


def write_program(path: Path, code: str) -> None:
    script = path.with_name(f"{path.name}.code.py")
    script.write_text(textwrap.dedent(code))
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(script))} "$@"\n')
    path.chmod(0o755)
