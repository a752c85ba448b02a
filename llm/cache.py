"""Where kvgate keeps what can be made again: converted models and engine logs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def user_cache(environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """The user's cache folder for kvgate; not created here. A relative XDG_CACHE_HOME counts as unset."""
    given = Path(environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():
        return given / "kvgate"
    if platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvgate"
    return Path.home() / ".cache" / "kvgate"
