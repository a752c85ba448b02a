"""The FastAPI application: what the gateway answers itself, and the document of what it proxies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from kvgate import __version__
from kvgate.errors import Problem
from server.admission import ROUTES, Route
from server.exchange.exchange import new_request_id
from server.gateway import Gateway
from server.watch import Watcher

_CODES = {404: "not_found", 405: "method_not_allowed"}


def create_app(gateway: Gateway) -> FastAPI:
    """The application over one gateway. Its lifespan watches the replicas and sweeps deadlines."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watcher = Watcher(gateway)
        await watcher.start()
        sweeper = asyncio.create_task(_sweep(gateway))
        try:
            yield
        finally:
            sweeper.cancel()
            await asyncio.gather(sweeper, return_exceptions=True)
            await watcher.stop()
            for connection in list(gateway.connections):
                connection.transport.abort()
            for replica in gateway.replicas.all:
                replica.pool.close()

    app = FastAPI(
        title="kvgate",
        version=__version__,
        summary="A gateway in front of vLLM engines that makes prefix caching visible.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _fault)

    @app.get("/health/live", tags=["operations"], summary="The process runs")
    async def live() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/health", tags=["operations"], summary="An engine answers (same as /health/ready)")
    @app.get(
        "/health/ready", tags=["operations"], summary="An engine answers", responses={503: {"description": "none does"}}
    )
    async def ready(response: Response) -> dict[str, Any]:
        if not gateway.ready:
            response.status_code = 503
            response.headers["retry-after"] = str(gateway.unavailable().retry_after)
        replicas = {replica.name: "up" if replica.up else "down" for replica in gateway.replicas.all}
        status = "draining" if gateway.draining else "ok" if gateway.ready else "no engine"
        return {"status": status, "replicas": replicas}

    @app.get("/v1/models", tags=["openai"], summary="The models that the engines serve")
    async def models() -> dict[str, Any]:
        if not gateway.replicas.served:
            raise gateway.unavailable()
        entries = [holders[0].models[name] for name, holders in gateway.replicas.by_model.items()]
        return {"object": "list", "data": entries}

    @app.get("/metrics", tags=["operations"], summary="Prometheus metrics of the gateway", response_class=Response)
    async def metrics() -> Response:
        return Response(generate_latest(gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    for route in ROUTES.values():
        _declare(app, route)
    return app


def _declare(app: FastAPI, route: Route) -> None:
    """Puts a proxied POST into the OpenAPI document; over a socket the Exchange answers it before it gets here."""
    error = {"description": "An error in OpenAI's shape"}

    async def proxied() -> None:
        raise Problem(500, "internal_error", "A proxied route was called past the gateway's protocol.")

    fields = {"model": {"type": "string"}, "stream": {"type": "boolean"}}
    kinds: dict[type, dict[str, Any]] = {str: {"type": "string"}, list: {"type": "array", "items": {}}}
    prompt: dict[str, Any] = {"anyOf": [kinds[kind] for kind in route.types]}
    schema = {
        "type": "object",
        "required": ["model", route.prompt],
        "properties": {**fields, route.prompt: prompt},
        "additionalProperties": True,
    }
    app.post(
        route.path,
        tags=[route.dialect],
        summary=route.summary,
        name=route.path,
        responses=dict.fromkeys((400, 404, 408, 413, 502, 503, 504), error),
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
    )(proxied)


def _respond(problem: Problem) -> Response:
    headers = {"x-request-id": new_request_id().decode("ascii")}
    if problem.retry_after is not None:
        headers["retry-after"] = str(problem.retry_after)
    return Response(problem.body(), status_code=problem.status, headers=headers, media_type="application/json")


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return _respond(error)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = "There is no such path here." if error.status_code == 404 else str(error.detail)
    response = _respond(Problem(error.status_code, _CODES.get(error.status_code, "http_error"), message))
    if error.headers:
        response.headers.update(error.headers)
    return response


async def _invalid(request: Request, error: Exception) -> Response:
    return _respond(Problem(400, "invalid_request", "The request's parameters are not valid."))


async def _fault(request: Request, error: Exception) -> Response:
    return _respond(Problem(500, "internal_error", "The gateway failed."))


async def _sweep(gateway: Gateway) -> None:
    """Looks at every client connection a few times within the shortest time-out, at most once a second otherwise."""
    s = gateway.settings
    shortest = min(s.first_byte_timeout, s.idle_timeout, s.header_timeout, s.body_timeout, s.keep_alive_timeout, 4.0)
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(shortest / 4)
        now = loop.time()
        for connection in list(gateway.connections):
            connection.sweep(now)
