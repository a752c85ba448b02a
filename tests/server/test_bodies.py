"""What engines answer is read whole, in however many pieces it comes, and never without bound."""

import asyncio

import aiohttp
import pytest
from aiohttp import web

from server.bodies import read_whole

PIECES = [b"a" * 1000, b"b" * 70_000, b"c"]


async def answer_in_pieces(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for piece in PIECES:
        await response.write(piece)
        await asyncio.sleep(0.01)  # so that it travels alone
    return response


async def read(limit: int) -> bytes:
    app = web.Application()
    app.router.add_get("/", answer_in_pieces)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/") as response:
            return await read_whole(response, limit)
    finally:
        await runner.cleanup()


async def test_a_body_that_comes_in_pieces_is_read_whole() -> None:
    assert await read(71_001) == b"".join(PIECES)


async def test_more_than_the_limit_is_refused() -> None:
    with pytest.raises(aiohttp.ClientPayloadError, match="more than 71000 bytes"):
        await read(71_000)
