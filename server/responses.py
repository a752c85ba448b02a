"""Stored responses of OpenAI's API: an engine keeps its own, so each is asked in turn until one knows the id.

No generation starts here, so these two calls go past the Exchange, through an ordinary client.
"""

from __future__ import annotations

import re
from typing import Any

import aiohttp
from fastapi import APIRouter, Request, Response

from kvgate.errors import Problem
from server.document import ELSE_THE_ENGINES, errors
from server.exchange.http1 import KEYS, NOT_TO_CLIENT, NOT_TO_ENGINE
from server.gateway import Gateway

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
# Not as parameters of the functions: FastAPI would then declare a 422 that is never given
_DECLARED: dict[str, Any] = {
    "description": ELSE_THE_ENGINES,
    "response_class": Response,
    "responses": {
        200: {
            "description": "What the engine answers",
            "content": {"application/json": {"schema": {"type": "object"}}},
        },
        **errors(400, 401, 404, 502, 503),
    },
    "openapi_extra": {
        "parameters": [
            {
                "name": "response_id",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "pattern": f"^{_ID.pattern}$"},
            }
        ]
    },
}


def responses_router(gateway: Gateway) -> APIRouter:
    """GET /v1/responses/{id} and POST /v1/responses/{id}/cancel."""
    router = APIRouter(tags=["openai"])

    async def ask(request: Request, action: str = "") -> Response:
        gateway.identify(request.headers.raw)
        response_id = request.path_params["response_id"]
        if not _ID.fullmatch(response_id):
            raise Problem(400, "invalid_id", "The response id is not valid.", param="response_id")
        sent = request.headers.raw
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in sent if k not in NOT_TO_ENGINE}
        key = gateway.credentials.for_engine([header for header in sent if header[0] in KEYS])
        if key:
            name, _, value = key.decode("latin-1").strip().partition(": ")
            headers[name] = value
        settings = gateway.settings
        timeout = aiohttp.ClientTimeout(sock_connect=settings.connect_timeout, sock_read=settings.idle_timeout)
        answer = None
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for replica in [r for r in gateway.replicas.all if r.up]:
                url = f"{replica.url}/v1/responses/{response_id}{action}"
                try:
                    async with session.request(request.method, url, headers=headers, allow_redirects=False) as got:
                        answer = Response(await got.read(), got.status, _kept(got))
                except (aiohttp.ClientError, TimeoutError) as error:
                    raise Problem(502, "engine_failed", "An engine did not answer.") from error
                if answer.status_code != 404:
                    return answer
        if answer is None:
            raise gateway.unavailable()
        return answer

    @router.get("/v1/responses/{response_id}", summary="A stored response", **_DECLARED)
    async def retrieve(request: Request) -> Response:
        return await ask(request)

    @router.post(
        "/v1/responses/{response_id}/cancel", summary="Cancel a response that runs in the background", **_DECLARED
    )
    async def cancel(request: Request) -> Response:
        return await ask(request, "/cancel")

    return router


def _kept(answer: aiohttp.ClientResponse) -> dict[str, str]:
    dropped = {name.decode() for name in NOT_TO_CLIENT} | {"content-encoding", "date", "server"}
    return {name.lower(): value for name, value in answer.headers.items() if name.lower() not in dropped}
