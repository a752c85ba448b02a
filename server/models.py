"""Public model names: those that engines serve, and aliases of them."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

from kvgate.errors import UsageError


class Aliases:
    """Names that clients may use for served ones; a pattern such as `claude-*` names many. Exact names come first."""

    def __init__(self, pairs: Collection[tuple[str, str]] = ()) -> None:
        self.exact = {name: target for name, target in pairs if not _is_pattern(name)}
        self._patterns = [(name, target) for name, target in pairs if _is_pattern(name)]

    @classmethod
    def parse(cls, text: str) -> Aliases:
        """From `alias=served,claude-*=served`; raises UsageError that names the part at fault."""
        pairs: dict[str, str] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, equals, target = (p.strip() for p in part.partition("="))
            if not (name and equals and target):
                raise UsageError(f"--aliases: {part!r} is not of the form alias=served-name")
            if name in pairs:
                raise UsageError(f"--aliases: {name!r} is given twice")
            pairs[name] = target
        return cls(list(pairs.items()))

    def resolve(self, name: str, served: Collection[str]) -> str | None:
        """The served name that `name` stands for, `name` itself if it is served; None if there is none."""
        if name in served:
            return name
        target = self.exact.get(name)
        if target is None:
            target = next((t for pattern, t in self._patterns if fnmatchcase(name, pattern)), None)
        return target if target in served else None


def _is_pattern(name: str) -> bool:
    return any(c in name for c in "*?[")
