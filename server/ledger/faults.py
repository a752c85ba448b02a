"""Faults of the gateway's own that must not cost a request: counted, and told now and then."""

from __future__ import annotations

import logging

logger = logging.getLogger("kvgate")


class Faults:
    """`count`: so far."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, doing: str) -> None:
        """Call it where an exception is being handled. The 1st, 2nd, 4th, 8th ... is logged whole: clients may cause many."""
        self.count += 1
        if self.count & (self.count - 1) == 0:
            logger.exception("a fault while %s, number %d; please report it. The request goes on", doing, self.count)
