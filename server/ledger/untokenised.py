"""Prompts that were sent and are not tokenised yet: a twin that comes meanwhile would go elsewhere, and be computed twice."""

from __future__ import annotations

from collections.abc import Hashable

OPENING = 64  # bytes, equal where prompts are compared at all
COMPARED = 16  # prompts of one opening, the latest ones

Opening = tuple[Hashable, bytes]
Entry = tuple[Opening, int]


class Untokenised:
    """Who adds a prompt takes it out again, once it is tokenised or will not be."""

    def __init__(self) -> None:
        self._prompts: dict[Opening, dict[int, tuple[bytes, str]]] = {}
        self._count = 0

    def add(self, namespace: Hashable, prompt: bytes, replica: str) -> Entry:
        """It went to this replica. The answer is for `remove`."""
        opening = (namespace, prompt[:OPENING])
        self._count += 1
        self._prompts.setdefault(opening, {})[self._count] = (prompt, replica)
        return opening, self._count

    def remove(self, entry: Entry) -> None:
        opening, number = entry
        prompts = self._prompts.get(opening)
        if prompts is not None and prompts.pop(number, None) is not None and not prompts:
            del self._prompts[opening]

    def shared(self, namespace: Hashable, prompt: bytes) -> dict[str, int]:
        """By replica, how many bytes the prompt begins with that a prompt on its way there begins with, too."""
        prompts = self._prompts.get((namespace, prompt[:OPENING]))
        if prompts is None:
            return {}
        found: dict[str, int] = {}
        for other, replica in list(prompts.values())[-COMPARED:]:
            found[replica] = max(found.get(replica, 0), common(prompt, other))
        return found


def common(one: bytes, other: bytes) -> int:
    """The length of their common prefix."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # equal up to `low`, not up to `high`
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
