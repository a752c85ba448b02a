"""What is told of a finished request, once, to the access log and to the tracer. Never prompt text, a key or a query string."""

from __future__ import annotations

from typing import NamedTuple


class RequestRecord(NamedTuple):
    """Times in seconds, sizes in bytes, tokens as the engine reports them; None is unknown or does not apply, never 0.

    ended: seconds since the epoch. request_id: ours, or the client's if it was vetted. model: a served name or "other".
    key_id: the key's id, not the key. replica: the last one tried. status: as in kvgate_requests_total, 499 for a client
    that left. ttft, duration: from the last byte of the request; None where there was no such moment. queue: waited for a
    place. overhead: until it was written to an engine. reason: the machine word of a refusal.
    """

    ended: float
    request_id: bytes
    route: str
    model: str
    tenant: str
    status: int
    stream: bool = False
    key_id: str | None = None
    replica: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft: float | None = None
    duration: float | None = None
    queue: float | None = None
    overhead: float | None = None
    retries: int = 0
    request_bytes: int = 0
    answer_bytes: int = 0
    reason: str | None = None
    trace_id: str | None = None
