"""What a policy is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from server.routing.asked import Asked

if TYPE_CHECKING:
    from server.replica import Replica


class Policy(Protocol):
    """Chooses by the request, not by load alone."""

    def choose(self, fit: Sequence[Replica], asked: Asked) -> Replica:
        """One of `fit`, which has at least one."""
        ...
