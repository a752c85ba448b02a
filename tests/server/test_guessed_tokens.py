"""How long a prompt is taken to be that cannot be known beforehand: by its bytes, and never longer than its model takes."""

from typing import Any

import pytest

from kvgate.settings import Settings
from server.admission import Admission
from server.gateway import Gateway
from server.replica import EngineUrl
from server.routes import ROUTES

BASE = {"id": "m", "parent": None, "max_model_len": 1000}
ADAPTER = {"id": "style", "parent": "m", "max_model_len": None}
SILENT = {"id": "m"}


@pytest.mark.parametrize(
    ("model", "entries", "body_bytes", "tokens"),
    [
        ("m", [BASE, ADAPTER], 2000, 500),
        ("m", [BASE, ADAPTER], 4_000_000, 1000),
        ("style", [BASE, ADAPTER], 4_000_000, 1000),
        ("m", [SILENT], 4_000_000, 1_000_000),
    ],
)
def test_a_guess_is_by_bytes_up_to_what_the_model_takes(
    model: str, entries: list[dict[str, Any]], body_bytes: int, tokens: int
) -> None:
    gateway = Gateway.build(Settings(), ["http://127.0.0.1:9"])
    gateway.replicas.reconcile([EngineUrl.parse("http://127.0.0.1:9")])
    gateway.replicas.on_learn = lambda replica: None  # no folder is looked for
    gateway.replicas.learn(gateway.replicas.all[0], {entry["id"]: entry for entry in entries})
    start = b'{"model":"%b","prompt":"' % model.encode()
    body = start.ljust(body_bytes - 2, b"x") + b'"}'
    admission = gateway.admit(ROUTES[b"/v1/completions"], gateway.identify([]), body, [])
    assert isinstance(admission, Admission)
    assert admission.asked.tokens == tokens
