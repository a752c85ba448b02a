"""The OpenAPI document: complete, and true of a running gateway, as far as schemathesis can tell."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import requests
import schemathesis
import uvloop
from fastapi.routing import iter_route_contexts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from server.app import create_app
from server.routes import ROUTES
from server.tenants.entries import KeyEntry, digest, new_secret
from tests.fakes import answers, behaviours
from tests.fakes.engine import Behaviour, FakeEngine
from tests.server.running import RunningGateway, running_gateway

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
OWN = {
    ("get", "/health"),
    ("get", "/health/live"),
    ("get", "/health/ready"),
    ("get", "/v1/models"),
    ("get", "/metrics"),
    ("get", "/kv/ledger"),
    ("get", "/kv/usage"),
    ("get", "/kv/replicas"),
    ("get", "/v1/responses/{response_id}"),
    ("post", "/v1/responses/{response_id}/cancel"),
}
PROXIED = {("post", route.path) for route in ROUTES.values()}
OPERATIONS = sorted(OWN | PROXIED)
RIGHT, WRONG = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
MODES = [(*operation, RIGHT) for operation in OPERATIONS] + [
    (method, path, WRONG) for method, path in OPERATIONS if method == "post" or "{" in path
]  # the others take nothing that could be wrong
DESCRIBES_ITSELF = "/openapi.json"


class Engine(FakeEngine):
    """Knows of no stored response, and answers every other POST."""

    def behaviour_for(self, method: str, path: str) -> Behaviour:
        if path.startswith("/v1/responses/"):
            return behaviours.status(404, answers.error(404, "There is no such response.", "NotFoundError"))
        return behaviours.Whole() if method == "POST" else super().behaviour_for(method, path)


@dataclass
class Served:
    """A gateway, and one that wants keys, with the loop that they run in; `errors` were logged.

    The loop runs while a request does: schemathesis's client blocks, and so does it in a thread.
    """

    runner: asyncio.Runner
    open: RunningGateway
    guarded: RunningGateway
    tenant_key: str
    errors: list[str]

    def call(self, request: Callable[..., Any], *given: Any, **more: Any) -> Any:
        return self.runner.run(asyncio.to_thread(request, *given, **more))

    def ask(self, method: str, url: str, **more: Any) -> requests.Response:
        return self.call(requests.request, method, url, timeout=10, **more)  # type: ignore[no-any-return]


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(
            "opentelemetry"
        ):  # exporters of other tests' gateways, giving up in the background
            self.found.append(self.format(record))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    secret = _key_file(keys)
    handler = _Errors()
    stack = contextlib.AsyncExitStack()

    async def start() -> tuple[RunningGateway, RunningGateway]:
        engine = await stack.enter_async_context(Engine())
        guarded = await stack.enter_async_context(running_gateway(engine.url, key_file=str(keys)))
        return await stack.enter_async_context(running_gateway(engine.url)), guarded

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        logging.getLogger().addHandler(handler)
        try:
            yield Served(runner, *runner.run(start()), secret, handler.found)
        finally:
            runner.run(stack.aclose())
            logging.getLogger().removeHandler(handler)


def _key_file(path: Path) -> str:
    secret = new_secret()
    path.write_bytes(KeyEntry("k-1", "alone", "tenant", digest(secret.encode())).line() + b"\n")
    path.chmod(0o600)
    return secret


@pytest.fixture(scope="module")
def document(served: Served) -> dict[str, Any]:
    return served.ask("GET", served.open.url + DESCRIBES_ITSELF).json()  # type: ignore[no-any-return]


def test_every_route_that_is_served_is_in_the_document(served: Served, document: dict[str, Any]) -> None:
    listed = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert listed == OWN | PROXIED
    found = {
        (method.lower(), str(context.path))
        for context in iter_route_contexts(create_app(served.open.gateway).routes)
        for method in context.methods or ()
    }
    assert found == listed | {("get", DESCRIBES_ITSELF), ("head", DESCRIBES_ITSELF)}


def test_a_proxied_route_tells_its_body_and_its_errors(document: dict[str, Any]) -> None:
    for route in ROUTES.values():
        operation = document["paths"][route.path]["post"]
        assert operation["summary"] == route.summary
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert {"model", *route.needs} | ({"stream"} if route.streams else set()) == schema["properties"].keys()
        said = operation["responses"]
        assert said.keys() == {"200", *map(str, (400, 401, 404, 408, 413, 429, 431, 502, 503, 504))}
        assert ("text/event-stream" in said["200"]["content"]) == route.streams
        shape = "AnthropicError" if route.dialect == "anthropic" else "OpenAIError"
        for status in said.keys() - {"200"}:
            assert said[status]["content"]["application/json"]["schema"]["$ref"].endswith(f"/{shape}")
    assert "HTTPValidationError" not in document["components"]["schemas"]  # the gateway has no 422


@pytest.fixture(scope="module")
def schema(served: Served, document: dict[str, Any]) -> Any:
    return schemathesis.openapi.from_dict(document)


@pytest.mark.parametrize(("method", "path", "mode"), MODES)
def test_answers_are_as_the_document_says(
    served: Served, schema: Any, method: str, path: str, mode: GenerationMode
) -> None:
    operation = schema[path][method]

    @settings(
        max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
    )
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy(generation_mode=mode))
        response = served.call(case.call, base_url=served.open.url, session=session)
        case.validate_response(response, checks=CHECKS)
        assert "Traceback" not in response.text

    with requests.Session() as session:
        holds()
    assert served.errors == []


def test_without_a_key_every_guarded_route_says_401_in_its_shape(served: Served, document: dict[str, Any]) -> None:
    for method, path in OPERATIONS:
        said = document["paths"][path][method]["responses"]
        url = served.guarded.url + path.replace("{response_id}", "resp_1")
        answer = served.ask(method, url, json={})
        assert (answer.status_code == 401) == ("401" in said), path
        if answer.status_code == 401:
            _in_shape(document, said["401"], answer)
    for path in ("/metrics", "/kv/replicas"):
        answer = served.ask("GET", served.guarded.url + path, headers={"x-api-key": served.tenant_key})
        assert answer.status_code == 403
        _in_shape(document, document["paths"][path]["get"]["responses"]["403"], answer)


def test_errors_are_in_the_shape_that_the_document_gives(served: Served, document: dict[str, Any]) -> None:
    for route in ROUTES.values():
        said = document["paths"][route.path]["post"]["responses"]
        for body, status in (
            (b"{", "400"),
            (b"[]", "400"),
            (b'{"model":"tiny"}', "400"),
            (b'{"model":"other"}', "404"),
        ):
            answer = served.ask("POST", served.open.url + route.path, data=body)
            assert str(answer.status_code) == status
            _in_shape(document, said[status], answer)
    answer = served.ask("POST", served.open.url + "/v1/messages", headers={"x-long": "l" * 70_000})
    assert answer.status_code == 431
    _in_shape(document, document["paths"]["/v1/messages"]["post"]["responses"]["431"], answer)


def _in_shape(document: dict[str, Any], said: dict[str, Any], answer: requests.Response) -> None:
    assert answer.headers["content-type"] == "application/json"
    schema = said["content"]["application/json"]["schema"] | {"components": document["components"]}
    jsonschema.validate(json.loads(answer.content), schema)
