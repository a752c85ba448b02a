"""The FastAPI application: what the gateway answers itself, and the document of what it proxies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from kvgate import __version__
from kvgate.errors import Problem
from server.cors import EXPOSED
from server.document import ELSE_THE_ENGINES, GUARDED, OPERATORS, PROXIED, Responses, errors
from server.gateway import Gateway
from server.ledger.report import ledger_report
from server.responses import responses_router
from server.routes import ROUTES, Route
from server.upkeep import upkeep
from server.usage_report import counts, usage_report

_CODES = {404: "not_found", 405: "method_not_allowed"}


def create_app(gateway: Gateway) -> FastAPI:
    """The application over one gateway. Its lifespan keeps the gateway up: see server/upkeep.py."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with upkeep(gateway):
            yield

    app = FastAPI(
        title="kvgate",
        version=__version__,
        summary="A gateway in front of vLLM engines that makes prefix caching visible.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    _answer_errors(app, gateway)
    if gateway.cors.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=gateway.cors.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=EXPOSED,
        )

    @app.get("/health/live", tags=["operations"], summary="The process runs")
    async def live() -> dict[str, str]:
        return {"status": "ok"}

    unready: Responses = {503: {"description": "none does", "content": {"application/json": {"schema": {}}}}}

    @app.get("/health", tags=["operations"], summary="An engine answers (same as /health/ready)", responses=unready)
    @app.get("/health/ready", tags=["operations"], summary="An engine answers", responses=unready)
    async def ready(response: Response) -> dict[str, Any]:
        if not gateway.ready:
            response.status_code = 503
            problem = gateway.going() if gateway.draining else gateway.unavailable()
            response.headers["retry-after"] = str(problem.retry_after)
            response.headers["x-kvgate-reason"] = str(problem.reason)
        replicas = {replica.name: "up" if replica.up else "down" for replica in gateway.replicas.all}
        status = "draining" if gateway.draining else "ok" if gateway.ready else "no engine"
        return {"status": status, "replicas": replicas}

    @app.get(
        "/v1/models", tags=["openai"], summary="The models that the engines serve", responses=errors(*GUARDED, 503)
    )
    async def models(request: Request) -> dict[str, Any]:
        gateway.identify(request.headers.raw)
        if not gateway.replicas.served:
            raise gateway.unavailable()
        return {"object": "list", "data": gateway.listed_models()}

    text: Responses = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

    @app.get(
        "/metrics",
        tags=["operations"],
        summary="Prometheus metrics of the gateway",
        response_class=Response,
        responses=text | errors(*OPERATORS),
    )
    async def metrics(request: Request) -> Response:
        gateway.identify(request.headers.raw, operator=True)
        return Response(generate_latest(gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get(
        "/kv/usage",
        tags=["kvgate"],
        summary="Tokens, saved prefill and money, of all tenants or of one's own",
        responses=errors(*GUARDED),
    )
    async def usage(request: Request) -> dict[str, Any]:
        identity = gateway.identify(request.headers.raw)
        tenant = None if identity.role == "operator" else identity.tenant
        return usage_report(counts(gateway.metrics.every_series), gateway.prices, gateway.since, tenant)

    @app.get(
        "/kv/ledger",
        tags=["kvgate"],
        summary="Tokens that could have hit, were routed to hit, and hit; of all tenants or of one's own",
        responses=errors(*GUARDED),
    )
    async def ledger(request: Request) -> dict[str, Any]:
        identity = gateway.identify(request.headers.raw)
        tenant = None if identity.role == "operator" else identity.tenant
        report = ledger_report(gateway.metrics.every_series, gateway.since, tenant)
        if gateway.ledger is not None and identity.role == "operator":
            report["index"] = gateway.ledger.report()
        return report

    @app.get(
        "/kv/replicas", tags=["kvgate"], summary="The engines, and what is known of each", responses=errors(*OPERATORS)
    )
    async def replicas(request: Request) -> dict[str, Any]:
        gateway.identify(request.headers.raw, operator=True)
        return {"replicas": [replica.report() for replica in gateway.replicas.known()]}

    app.include_router(responses_router(gateway))
    for route in ROUTES.values():
        _declare(app, route)
    return app


def _declare(app: FastAPI, route: Route) -> None:
    """Puts a proxied POST into the OpenAPI document; over a socket the Exchange answers it before it gets here."""

    async def proxied() -> None:
        raise Problem(500, "internal_error", "A proxied route was called past the gateway's protocol.")

    kinds: dict[type, dict[str, Any]] = {str: {"type": "string"}, list: {"type": "array", "items": {}}}
    model = {"type": "string", "description": "One of GET /v1/models; may be left out where there is but one"}
    properties: dict[str, Any] = {"model": model}
    if route.streams:
        properties["stream"] = {"type": "boolean"}
    for name, types in route.needs.items():
        properties[name] = {"anyOf": [kinds[kind] for kind in types]}
    schema = {
        "type": "object",
        "anyOf": [{"required": [name]} for name in route.needs],
        "properties": properties,
        "additionalProperties": True,
    }
    content = {"application/json": {"schema": {"type": "object"}}}
    if route.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    whole: Responses = {200: {"description": "What the engine answers", "content": content}}
    app.post(
        route.path,
        response_class=Response,
        tags=[route.dialect],
        summary=route.summary,
        name=route.path,
        description=ELSE_THE_ENGINES,
        responses=whole | errors(*PROXIED, dialect=route.dialect),
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
    )(proxied)


def _answer_errors(app: FastAPI, gateway: Gateway) -> None:
    """Errors of the gateway's own routes, in OpenAI's shape."""

    def respond(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
        given = {"x-request-id": gateway.new_id().decode("ascii"), **(headers or {})}
        if problem.retry_after is not None:
            given["retry-after"] = str(problem.retry_after)
        if problem.reason is not None:
            given["x-kvgate-reason"] = problem.reason
        return Response(problem.body(), status_code=problem.status, headers=given, media_type="application/json")

    @app.exception_handler(Problem)
    async def problem(request: Request, error: Problem) -> Response:
        return respond(error)

    @app.exception_handler(HTTPException)
    async def http_exception(request: Request, error: HTTPException) -> Response:
        message = "There is no such path here." if error.status_code == 404 else str(error.detail)
        return respond(Problem(error.status_code, _CODES.get(error.status_code, "http_error"), message), error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return respond(Problem(400, "invalid_request", "The request's parameters are not valid."))

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:
        # Starlette answers this outside of all middleware, that of CORS included
        lines = b"".join(gateway.cors.lines(request.headers.raw)).decode("latin-1").splitlines()
        return respond(Problem(500, "internal_error", "The gateway failed."), dict(x.split(": ", 1) for x in lines))
