"""Whole bodies of what engines answer to the gateway's own questions."""

from __future__ import annotations

import aiohttp


async def read_whole(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body, of at most `limit` bytes; raises aiohttp.ClientPayloadError for more.

    (`content.read(limit)` would give what has come so far.)
    """
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > limit:
            raise aiohttp.ClientPayloadError(f"more than {limit} bytes")
    return bytes(body)
