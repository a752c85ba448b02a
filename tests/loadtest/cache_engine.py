"""A fake vLLM on a real socket that keeps a prefix cache as vLLM does: whole blocks, chained, keyed by the salt, never
the last token. It never evicts. `Faults` makes it lie or break."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

MODEL = "fake-model"


@dataclass
class Faults:
    """What goes wrong. Each is a lie that the load test must notice."""

    drop_salt: bool = False  # a gateway that strips cache_salt
    hide_cached: bool = False  # no --enable-prompt-tokens-details
    no_reuse: bool = False  # prefix caching off
    prompt_off_by: int = 0
    output_off_by: int = 0
    extra_cached: int = 0
    counter_off_by: int = 0
    break_after: int | None = None  # tokens, then the connection closes
    no_done: bool = False
    error_event: bool = False
    status: int = 200
    only_every: int = 1  # faults of the stream hit each n-th measured request


@dataclass
class CacheEngine:
    block_size: int = 16
    prefill_s_per_token: float = 0.0
    token_s: float = 0.0
    max_model_len: int = 100_000
    slots: int | None = None
    faults: Faults = field(default_factory=Faults)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    port: int = 0
    metrics_on: bool = True
    _blocks: set[bytes] = field(default_factory=set)
    _running: int = 0
    _prompt_total: int = 0
    _cached_total: int = 0
    _runner: web.AppRunner | None = None
    _slots: asyncio.Semaphore | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def metrics_url(self) -> str:
        return f"{self.url}/metrics"

    async def __aenter__(self) -> CacheEngine:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.get("/version", self._version),
                web.get("/health", self._health),
            ]
        )
        self._slots = asyncio.Semaphore(self.slots) if self.slots else None
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def _look_up(self, ids: list[int], salt: str) -> int:
        """Tokens found; all whole blocks of the prompt are kept afterwards."""
        size, parent, found, hitting = self.block_size, salt.encode(), 0, True
        for end in range(size, len(ids) + 1, size):
            block = orjson.dumps(ids[end - size : end])
            parent = hashlib.sha256(parent + block).digest()
            hitting = hitting and parent in self._blocks and end < len(ids)
            found += size if hitting else 0
            self._blocks.add(parent)
        return found

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.bodies.append(body)
        self.keys.add(request.headers.get("authorization"))
        faults, ids = self.faults, body["prompt"]
        faulty = len(self.bodies) % faults.only_every == 0
        if faults.status != 200 and faulty:
            return web.json_response({"error": {"message": "no, thanks"}}, status=faults.status)
        salt = "" if faults.drop_salt else body.get("cache_salt", "")
        cached = 0 if faults.no_reuse else self._look_up(ids, salt) + faults.extra_cached
        self._running += 1
        try:
            if self._slots is not None:
                async with self._slots:
                    return await self._stream(request, body, cached, faulty)
            return await self._stream(request, body, cached, faulty)
        finally:
            self._running -= 1

    async def _stream(
        self, request: web.Request, body: dict[str, Any], cached: int, faulty: bool
    ) -> web.StreamResponse:
        faults, ids = self.faults, body["prompt"]
        await asyncio.sleep((len(ids) - cached) * self.prefill_s_per_token)
        self._prompt_total += len(ids)
        self._cached_total += cached + faults.counter_off_by
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        tokens = max(1, body["max_tokens"] + faults.output_off_by)
        usage: dict[str, Any] = {"prompt_tokens": len(ids) + faults.prompt_off_by, "completion_tokens": 0}
        for n in range(tokens):
            if faulty and faults.break_after == n:
                assert request.transport is not None
                request.transport.close()
                return response
            if faulty and faults.error_event and n == 1:
                await response.write(b'data: {"error": {"message": "engine died"}}\n\n')
                await response.write(b"data: [DONE]\n\n")
                return response
            usage["completion_tokens"] = n + 1
            chunk = {"choices": [{"index": 0, "text": "data: [DONE]"}], "usage": usage}
            await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
            await asyncio.sleep(self.token_s)
        if not faults.hide_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        await response.write(b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\n")
        if not (faulty and faults.no_done):
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL, "max_model_len": self.max_model_len}]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _metrics(self, request: web.Request) -> web.Response:
        assert "authorization" not in request.headers, "the key is the gateway's"
        if not self.metrics_on:
            return web.Response(status=404)
        labels = f'{{engine="0",model_name="{MODEL}"}}'
        info = f'block_size="{self.block_size}",kv_cache_size_tokens="46592",enable_prefix_caching="True"'
        lines = [
            "# TYPE vllm:cache_config_info gauge",
            f"vllm:cache_config_info{{{info}}} 1.0",
            f"vllm:prompt_tokens_total{labels} {float(self._prompt_total)}",
            f"vllm:prompt_tokens_cached_total{labels} {float(self._cached_total)}",
            f"vllm:prefix_cache_hits_total{labels} {float(self._cached_total)}",
            f"vllm:num_requests_running{labels} {float(self._running)}",
            f"vllm:num_requests_waiting{labels} 0.0",
        ]
        return web.Response(text="\n".join(lines) + "\n")
