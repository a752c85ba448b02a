"""Which model to ask for, checked before minutes are spent on a run that cannot work."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson

from kvgate.errors import SetupError, UsageError
from loadtest.plan import Plan


async def served_models(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    """The entries of GET /v1/models. Raises SetupError when there is no such list."""
    try:
        async with session.get(f"{url}/v1/models", timeout=aiohttp.ClientTimeout(total=10)) as response:
            body, status = await response.read(), response.status
    except (aiohttp.ClientError, TimeoutError) as error:
        raise SetupError(f"--url {url}: no answer: {error or 'nothing in 10 s'}") from error
    if status != 200:
        raise SetupError(f"--url {url}: GET /v1/models answers HTTP {status}")
    try:
        return [dict(entry) for entry in orjson.loads(body)["data"]]
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise SetupError(f"--url {url}: GET /v1/models is not a list of models") from error


def choose(listed: list[dict[str, Any]], wanted: str | None, plan: Plan) -> str:
    """The wanted model, else the only one. Raises UsageError naming the flag, also when the context is too short."""
    names = [str(entry.get("id")) for entry in listed]
    if wanted is None:
        if len(names) != 1:
            raise UsageError(f"--model: name one of {', '.join(names) or '(none is served)'}")
        wanted = names[0]
    if wanted not in names:
        raise UsageError(f"--model {wanted}: not served; there is {', '.join(names) or 'none'}")
    limit = listed[names.index(wanted)].get("max_model_len")
    for phase, shape in plan.shapes.items():
        if isinstance(limit, int) and shape.longest > limit:
            flag = "--prefix-tokens" if phase == "loaded" else "--unloaded-prefix-tokens"
            raise UsageError(
                f"{flag} {shape.prefix_tokens}: the longest {phase} request is {shape.longest} tokens with its answer, "
                f"{wanted} holds {limit}; shorten the prefix, the turns or the output"
            )
    return wanted
