"""What a policy may know of a request before it is sent."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcache.match import NOTHING, Match

if TYPE_CHECKING:
    from llm.prompt import Prompt
    from server.ledger.shelf import Speller


@dataclass(slots=True)
class Asked:
    """One request.

    Unknown is zero, empty or None. tokens: of its prompt, an estimate until the engine has counted. output: that it may
    generate. session: what names the conversation. prompt: the bytes that it is matched by; namespace: the tree of the index
    that it belongs to. match: what each replica held when it was last looked up, as far as it is counted on; held: all of it,
    of which `twins` has what prompts on their way there share with this one, in bytes. unspelled: it takes work in a thread
    before it can be matched. unrendered: route and body, where rendering is part of that. rendered, speller: for tokenising it.
    """

    tokens: int = 0
    output: int = 0
    session: bytes = b""
    prompt: bytes | None = None
    namespace: Hashable = None
    match: Match = field(default=NOTHING)
    held: Match = field(default=NOTHING)
    twins: dict[str, int] = field(default_factory=dict)
    unspelled: bool = False
    unrendered: tuple[str, Mapping[str, Any]] | None = None
    rendered: Prompt | None = None
    speller: Speller | None = None


UNKNOWN = Asked()  # for policies that look at no request; never written to
