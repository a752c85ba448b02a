"""What must be known of a request, and may it pass: one plain function, called by every route."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import orjson

from kvgate.errors import Problem
from server.models import Aliases
from server.routes import Kinds, Route
from server.routing.asked import UNKNOWN, Asked
from server.splice import apply, ask_for_usage, set_members

_NAMES: dict[type, str] = {str: "a string", list: "an array", dict: "an object", bool: "a boolean"}


class Admission(NamedTuple):
    """An admitted request. `model` is the served name; `body` what the engine gets; `stream` what the client asked for.

    `hides_usage`: the gateway asked for a usage chunk that the client did not ask for and must not see.
    """

    model: str
    stream: bool
    body: bytes
    hides_usage: bool
    asked: Asked


def admit(
    route: Route,
    body: bytes,
    served: Collection[str],
    aliases: Aliases,
    salt_for: Callable[[str | None], str | None],
    ask: Callable[[str, dict[str, Any], str | None], Asked] | None = None,
) -> Admission | Problem:
    """Checks the few fields that the gateway needs; all others are the engine's to judge, and stay as they were sent.

    `served` are the model names, at least one. `salt_for` gives the cache salt for the engine, from that which the client
    sent, if any; None leaves the request as it is. `ask` gives what the policy goes by, from model, fields and the salt
    that the engine gets.
    """
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return Problem(400, "invalid_json", f"The body is not valid JSON: {error.msg}.")
    if type(fields) is not dict:
        return Problem(400, "invalid_type", "The body must be a JSON object.")

    model = _model(fields.get("model"), served, aliases)
    if isinstance(model, Problem):
        return model
    stream = fields.get("stream") if route.streams else None
    if stream is not None and type(stream) is not bool:
        return _wrong_type("stream", (bool,), stream)
    if problem := _lacks(route, fields):
        return problem

    values: dict[str, bytes] = {}
    if "model" in fields and model != fields["model"]:
        values["model"] = orjson.dumps(model)
    sent = fields.get("cache_salt")
    sent = sent if type(sent) is str else None
    salt = salt_for(sent)
    if salt is not None:
        values["cache_salt"] = orjson.dumps(salt)
    edits = set_members(body, values) if values else []
    hides_usage = bool(stream) and route.usage_option and not _asks_for_usage(fields.get("stream_options"))
    if hides_usage:
        edits += ask_for_usage(body)
    asked = UNKNOWN if ask is None else ask(model, fields, sent if salt is None else salt or None)
    return Admission(model, bool(stream), apply(body, edits) if edits else body, hides_usage, asked)


def _model(asked: Any, served: Collection[str], aliases: Aliases) -> str | Problem:
    if asked is None:
        if len(served) == 1:
            return next(iter(served))
        return Problem(400, "missing_field", "'model' is missing: name one of GET /v1/models.", param="model")
    if type(asked) is not str:
        return _wrong_type("model", (str,), asked)
    model = aliases.resolve(asked, served)
    if model is None:
        names = ", ".join(sorted(served)[:20])
        return Problem(404, "model_not_found", f"The model does not exist here. Served: {names}.", param="model")
    return model


def _lacks(route: Route, fields: dict[str, Any]) -> Problem | None:
    """What is wrong with the fields of which the route needs one."""
    for name, kinds in route.needs.items():
        value = fields.get(name)
        if value is not None:
            return None if type(value) in kinds else _wrong_type(name, kinds, value)
    names = " or ".join(f"'{name}'" for name in route.needs)
    return Problem(400, "missing_field", f"{names} is missing.", param=next(iter(route.needs)))


def _asks_for_usage(options: Any) -> bool:
    return isinstance(options, dict) and options.get("include_usage") is True


def _wrong_type(field: str, kinds: Kinds, value: Any) -> Problem:
    expected = " or ".join(_NAMES[kind] for kind in kinds)
    return Problem(
        400, "invalid_type", f"'{field}' must be {expected}, not {_NAMES.get(type(value), 'a number')}.", param=field
    )
