"""What of a match is to be counted on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from kvcache.index import PrefixIndex
from kvcache.match import Match
from server.routing.asked import Asked


def without(match: Match, names: Collection[str]) -> Match:
    """As if these replicas held nothing."""
    if match.tokens.keys().isdisjoint(names):
        return match
    tokens = {name: held for name, held in match.tokens.items() if name not in names}
    return replace(match, tokens=tokens, available=max(tokens.values(), default=0))


def with_twins(match: Match, asked: Asked, index: PrefixIndex) -> Match:
    """As if what the prompt shares with those on their way to a replica (`asked.twins`) were held there; in whole blocks, like
    all that is held. What adds nothing is no twin."""
    tokens, twins = dict(match.tokens), dict[str, int]()
    sizes = index.forest.trees.get(asked.namespace, ())
    for name, length in asked.twins.items():
        known = index.replicas.get(name)
        if known is not None:
            shared = asked.tokens * length // max(1, len(asked.prompt or b""))
            shared -= shared % (known.block_size or min(sizes, default=1))
            if shared > tokens.get(name, 0):
                tokens[name], twins[name] = shared, length
    asked.twins = twins
    return replace(match, tokens=tokens, available=max(tokens.values(), default=0))
