"""What is expected of one attempt, from its dispatch to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache.expected import Ticket
from server.ledger.untokenised import Entry
from server.routing.asked import Asked
from server.routing.work import Job

if TYPE_CHECKING:
    from server.replica import Replica


@dataclass(slots=True, eq=False)
class Forecast:
    """Tokens of the longest prefix that any replica holds, that this one holds, and the last ones of these that it holds
    only once a request under way has been computed; in whole blocks. `known`: the prompt could be matched at all, and something
    tells what this replica holds."""

    asked: Asked
    replica: Replica
    available: int
    routed: int
    in_flight: int
    known: bool
    sent_at: float
    job: Job
    ticket: Ticket | None = None
    entry: Entry | None = None  # among the prompts that are not tokenised yet
    tokens: int | None = None  # of the prompt, as counted here
    ended: bool = False
    spelled: bool = False  # its blocks are all known
    settled: tuple[int, int | None] | None = None  # prompt and delivered tokens, where the index is inferred from them
