"""Policy `session`: one conversation stays with one replica, and no replica gets far more than its share.

Rendezvous hashing: each replica draws a number for the session's name, the highest has it. When a replica comes or goes, only
its own sessions move. One that has too many requests in flight is passed over: consistent hashing
with bounded loads, by Mirrokni, Thorup and Zadimoghaddam.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from server.routing.asked import Asked

if TYPE_CHECKING:
    from server.replica import Replica

HEADER = b"x-session-id"
BOUND = 1.25  # times the mean of requests in flight


def session_of(headers: Sequence[tuple[bytes, bytes]], fields: Mapping[str, Any]) -> bytes:
    """What names the conversation: OpenAI's prompt_cache_key, the header, else the user; empty if nothing does."""
    key = fields.get("prompt_cache_key")
    if type(key) is str and key:
        return key.encode(errors="replace")
    for name, value in headers:
        if name == HEADER and value:
            return value
    metadata = fields.get("metadata")
    user = fields.get("user") or (metadata.get("user_id") if isinstance(metadata, dict) else None)
    return user.encode(errors="replace") if type(user) is str else b""


class SessionPolicy:
    """Requests that name no session go where the fewest are in flight."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, fit: Sequence[Replica], asked: Asked) -> Replica:
        if asked.session:
            most = BOUND * (sum(replica.inflight for replica in fit) + 1) / len(fit)
            ranked = sorted(fit, key=lambda replica: _draw(asked.session, replica.name), reverse=True)
            for replica in ranked:
                if replica.inflight + 1 <= max(most, 1):
                    return replica
        least = min(replica.inflight for replica in fit)
        choices = [replica for replica in fit if replica.inflight == least]
        self._turn = turn = self._turn + 1
        return choices[turn % len(choices)]


def _draw(session: bytes, replica: str) -> bytes:
    return blake2b(replica.encode(), digest_size=8, key=blake2b(session, digest_size=32).digest()).digest()
