"""The routes of one simulated engine."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from loadtest.sim import asks
from loadtest.sim.answers import Answer
from loadtest.sim.asks import Body, Refused
from loadtest.sim.engine import Engine
from loadtest.sim.faults import HELP
from loadtest.sim.generation import Generation
from loadtest.sim.hangup import reset
from loadtest.sim.hashing import TOKEN
from loadtest.sim.tokens import FolderCoder

if TYPE_CHECKING:
    from loadtest.sim.replica import Replica

VERSION = "0.32.0"  # of the vLLM that is simulated
MAX_BODY_BYTES = 256 << 20
SLOW_TEXT = 20_000  # characters from which a model's tokenizer runs in a thread; it takes 2 µs for each four of them

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._settings = replica.settings
        self._language = replica.settings.language

    def app(self) -> web.Application:
        app = web.Application(middlewares=[_refusals], client_max_size=MAX_BODY_BYTES)
        app.router.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completions),
                web.get("/v1/models", self._models),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.get("/health", self._health),
                web.route("*", "/ping", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
                web.get("/kv_event_sources", self._sources),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
                web.get("/sim/faults", self._show_faults),
                web.post("/sim/faults", self._set_faults),
            ]
        )
        return app

    def _engine(self) -> Engine:
        if self._replica.engine is None:
            raise Refused(503, "The engine is down")
        return self._replica.engine

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=True)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=False)

    async def _generate(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        injector = self._replica.injector
        raw = await request.read()
        if (status := injector.error()) is not None:
            raise Refused(status, "An injected fault")
        reset_after = injector.reset_after()
        body = asks.parse(raw)
        asks.served(body, self._settings.model)
        prompts = [await self._rendered(request.path, body)] if chat else await self._completion_tokens(body)
        session = request.headers.get("x-session-id")
        ask = asks.generation(body, prompts, self._settings.model, chat=chat, session=session)
        if reset_after == 0:
            return await _reset(request)
        settings = self._settings
        answer = Answer(ask, chat=chat, request_id=request.headers.get("x-request-id"))
        generation = Generation(
            self._engine(), self._language, answer, details=settings.details, answer_tokens=settings.answer_tokens
        )
        try:
            if ask.stream:
                return await _stream(request, generation, reset_after)
            whole = await generation.whole(reset_after)
        finally:
            generation.leave()
        return await _reset(request) if whole is None else _json(whole)

    async def _rendered(self, route: str, body: Body) -> array[int]:
        prompt = self._language.prompt(route, body)
        return await self._encode(prompt.text or "", specials=prompt.add_special_tokens)

    async def _completion_tokens(self, body: Body) -> list[array[int]]:
        specials = asks.adds_specials(body)
        return [
            await self._encode(prompt, specials=specials) if isinstance(prompt, str) else prompt
            for prompt in asks.completion_prompts(body, self._language.coder.vocabulary)
        ]

    async def _encode(self, text: str, *, specials: bool) -> array[int]:
        coder = self._language.coder
        if len(text) >= SLOW_TEXT and isinstance(coder, FolderCoder):
            return array(TOKEN, await asyncio.to_thread(coder.encode, text, specials=specials))
        return array(TOKEN, coder.encode(text, specials=specials))

    async def _models(self, request: web.Request) -> web.Response:
        model, now = self._settings.model, int(time.time())
        card = {"object": "model", "created": now, "owned_by": "vllm"}
        cards = [{"id": model.name, **card, "root": model.root, "parent": None, "max_model_len": model.max_model_len}]
        cards += [
            {"id": lora.name, **card, "root": lora.path, "parent": model.name, "max_model_len": None}
            for lora in model.loras.values()
        ]
        return _json(orjson.dumps({"object": "list", "data": cards}))

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = asks.parse(await request.read())
        asks.served(body, self._settings.model)
        tokens = (await self._rendered(request.path, body)).tolist()
        done: dict[str, Any] = {"count": len(tokens), "max_model_len": self._settings.model.max_model_len}
        pieces = self._language.coder.pieces(tokens) if body.get("return_token_strs") else None
        return _json(orjson.dumps(done | {"tokens": tokens, "token_strs": pieces}))

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = asks.parse(await request.read())
        asks.served(body, self._settings.model)
        text = self._language.coder.decode(asks.pack(body.get("tokens"), "tokens"))
        return _json(orjson.dumps({"prompt": text}))

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._replica.healthy else 503)

    async def _version(self, request: web.Request) -> web.Response:
        return _json(orjson.dumps({"version": VERSION}))

    async def _metrics(self, request: web.Request) -> web.Response:
        headers = {"content-type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self._engine().metrics.exposition(), headers=headers)

    async def _sources(self, request: web.Request) -> web.Response:
        endpoints = self._replica.endpoints
        return _json(orjson.dumps({"0": endpoints.source()} if endpoints else {}))

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        """As in vLLM: 200 in any case, the body tells."""
        running = request.query.get("reset_running_requests", "").lower() in ("true", "1")
        return _json(orjson.dumps({"success": self._engine().reset_prefix_cache(reset_running=running)}))

    async def _show_faults(self, request: web.Request) -> web.Response:
        return _json(orjson.dumps({"faults": self._replica.injector.faults.as_dict(), "help": HELP}))

    async def _set_faults(self, request: web.Request) -> web.Response:
        """?replica=N sets another's, ?replica=all everyone's."""
        given = asks.parse(await request.read())
        targets = self._targets(request.query.get("replica"))
        try:
            for replica in targets:
                replica.injector.change(given)
        except ValueError as error:
            raise Refused(400, str(error)) from error
        response = _json(orjson.dumps({"faults": targets[0].injector.faults.as_dict()}))
        down_s = given.get("restart_down_s")
        if down_s is not None:
            response.force_close()
            for replica in targets:
                await replica.restart(down_s, keep=request.transport)
        return response

    def _targets(self, named: str | None) -> list[Replica]:
        siblings = self._replica.siblings
        if named is None:
            return [self._replica]
        if named == "all":
            return list(siblings)
        if named.isascii() and named.isdigit() and int(named) < len(siblings):
            return [siblings[int(named)]]
        raise Refused(400, f"replica={named}: give all, or a number from 0 to {len(siblings) - 1}")


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as refused:
        return _json(refused.body(), refused.status)
    except web.HTTPException as error:
        return _json(Refused(error.status, error.reason).body(), error.status)


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


async def _stream(request: web.Request, generation: Generation, reset_after: int | None) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    async with aclosing(generation.events()) as events:
        async for data in events:
            await response.write(data)
            if reset_after is not None and generation.tokens >= reset_after:
                return await _reset(request)
    return response


async def _reset(request: web.Request) -> web.StreamResponse:
    if request.transport is not None:
        reset(request.transport)
    await asyncio.Event().wait()  # cancelled with the connection
    raise AssertionError
