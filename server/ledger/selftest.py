"""Does an engine deliver what is predicted for it? Asked of each one when it comes up, with a prompt nobody else has.

The prompts made here are compared with the engine's own /tokenize; then one prompt is sent twice, and its blocks have to be
announced, predicted and delivered. Whatever fails is said with the way to mend it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from kvcache.match import Match, usable
from llm.check import check, probes
from llm.model import Model
from llm.prompt import Unrendered
from server.bodies import read_whole

BLOCKS = 3
TURNS = 8  # for a prompt to come again to the engine that has it, of those of a data-parallel server
EVENT_SECONDS = 5.0  # that an announcement may take
LOOK_SECONDS = 0.02
MAX_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Verdict:
    """Tokens that were announced, predicted and delivered for the probe's second time; None was not to be learnt.

    `problem`: what is wrong, with the way to mend it; empty if nothing is. `strange`: the prompts made here are not the engine's.
    """

    announced: int | None = None
    predicted: int | None = None
    delivered: int | None = None
    problem: str = ""
    strange: bool = False

    def report(self) -> dict[str, Any]:
        return {
            "ok": not self.problem,
            "announced_tokens": self.announced,
            "predicted_tokens": self.predicted,
            "delivered_tokens": self.delivered,
            "problem": self.problem or None,
        }


class Refused(Exception):
    """The engine did not answer the probe as an engine does: a few words."""


class SelfTest:
    """Of one engine, over a session of the caller's (with the engine's key, if it has one).

    match: what the engine is now thought to hold of a completion with these fields. events: whether its events are followed.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        name: str,
        model: Model,
        block_size: int,
        match: Callable[[dict[str, Any]], Awaitable[Match]],
        events: bool,
    ) -> None:
        self._session = session
        self._url = url
        self._name = name
        self._model = model
        self._block_size = block_size
        self._match = match
        self._events = events

    async def run(self) -> Verdict:
        """The verdict; it never raises for what an engine does."""
        try:
            problem = await self._compare_prompts()
            return Verdict(problem=problem, strange=True) if problem else await self._probe()
        except Refused as error:
            return Verdict(problem=f"the engine did not answer the probe: {error}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return Verdict(problem=f"the engine did not answer the probe: {str(error) or type(error).__name__}")

    async def _compare_prompts(self) -> str:
        """Where prompts made here are not those of the engine; empty if they all are."""
        for body in probes():
            made = self._model.renderer.render("/tokenize", body)
            if isinstance(made, Unrendered):
                continue
            answer = await self._post("/tokenize", {"model": self._name, **body}, may_refuse=True)
            if answer is not None and not isinstance(answer.get("tokens"), list):
                raise Refused("/tokenize gave no tokens")
            found = check(self._model.renderer, self._model.tokenizer, body, answer)
            if found is not None and not isinstance(found, Unrendered):
                return (
                    f"prompts made here are not the engine's ({found}): give --tokenizer the very folder that the engine "
                    "loads, and the gateway the engine's chat template"
                )
        return ""

    async def _probe(self) -> Verdict:
        size, model = self._block_size, self._model
        nonce = secrets.token_hex(8)
        text, count = "", 0
        while count < BLOCKS * size + 2:
            text += f"kvgate self-test {nonce} {count}. "
            count = len(model.tokenizer.encode(text, True))
        fields = {"model": self._name, "prompt": text, "max_tokens": 1, "temperature": 0, "cache_salt": nonce}
        tokens, cached = await self._complete(fields)
        if tokens != count:
            problem = f"the engine counts {tokens} tokens in a prompt that has {count} here: another tokenizer"
            return Verdict(problem=problem, strange=True)
        if cached is None:
            return Verdict(
                problem="it does not say what came from its cache: start it with --enable-prompt-tokens-details"
            )
        if not self._events:
            return await self._without_events(fields, count)
        announced = await self._announced(fields, usable(count, count, size))
        predicted = usable(announced, count, size)
        delivered = await self._delivered(fields)
        problem = ""
        if not delivered:
            problem = "it delivered nothing of a prompt it had just computed: is prefix caching switched off?"
        elif not announced:
            problem = (
                "it announced no block of what it had just computed: see --kv-events, and its own --kv-events-config"
            )
        elif delivered != predicted:
            problem = f"its blocks do not have the {size} tokens that it announced, or its events are of another engine"
        return Verdict(announced, predicted, delivered, problem)

    async def _without_events(self, fields: dict[str, Any], count: int) -> Verdict:
        delivered = await self._delivered(fields)
        if delivered:
            return Verdict(delivered=delivered)
        problem = "it delivered nothing of a prompt it had just computed: is prefix caching switched off?"
        return Verdict(delivered=delivered, problem=problem)

    async def _delivered(self, fields: dict[str, Any]) -> int | None:
        """Tokens that came from its cache, of a prompt that one of its engines has computed."""
        for _ in range(TURNS):
            _, delivered = await self._complete(fields)
            if delivered:
                break
        return delivered

    async def _announced(self, fields: dict[str, Any], expected: int) -> int:
        """Tokens of the prompt's blocks that events told of, once there are as many as expected or time is up."""
        for _ in range(round(EVENT_SECONDS / LOOK_SECONDS)):
            found = (await self._match(fields)).available
            if found >= expected:
                return found
            await asyncio.sleep(LOOK_SECONDS)
        return (await self._match(fields)).available

    async def _complete(self, fields: dict[str, Any]) -> tuple[int, int | None]:
        """Prompt tokens, and those that came from the cache."""
        answer = await self._post("/v1/completions", fields)
        usage = answer.get("usage") if answer is not None else None
        if not isinstance(usage, dict) or type(usage.get("prompt_tokens")) is not int:
            raise Refused("/v1/completions gave no usage")
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return usage["prompt_tokens"], cached if type(cached) is int else None

    async def _post(self, path: str, body: dict[str, Any], may_refuse: bool = False) -> dict[str, Any] | None:
        data = orjson.dumps(body)
        headers = {"content-type": "application/json"}
        async with self._session.post(self._url + path, data=data, headers=headers, allow_redirects=False) as response:
            text = await read_whole(response, MAX_BYTES)
            if response.status == 400 and may_refuse:
                return None
            if response.status != 200:
                raise Refused(f"{path} answered {response.status}")
        try:
            answer = orjson.loads(text)
        except orjson.JSONDecodeError:
            raise Refused(f"{path} answered something that is not JSON") from None
        if not isinstance(answer, dict):
            raise Refused(f"{path} answered something that is no object")
        return answer
