"""How long a prompt is taken to be that cannot be known beforehand: by its bytes, and never longer than its model takes."""

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvgate.settings import Settings
from llm.model import open_model
from server.admission import Admission
from server.gateway import Gateway
from server.ledger.ledger import Ledger
from server.ledger.shelf import Served, Speller
from server.metrics import GatewayMetrics
from server.replica import EngineUrl
from server.routes import ROUTES
from tests.llm.test_renderer import PARTS, VISION
from tests.llm.toys import write_folder

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


def test_what_comes_after_an_image_counts(tmp_path: Path) -> None:
    """It is matched up to there, and has to be computed all the same."""
    folder = write_folder(tmp_path, chat_template_jinja=PARTS, **VISION)
    ledger = Ledger(Settings(), GatewayMetrics(CollectorRegistry()), {})
    ledger._shelf._served["m"] = Served(Speller(open_model(folder), "m"), None)

    def tokens(*parts: dict[str, Any]) -> int:
        fields = {"messages": [{"role": "user", "content": list(parts)}]}
        return ledger.ask("/v1/chat/completions", "m", fields, None).tokens

    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    text = {"type": "text", "text": "what is to be seen there? " * 40}
    assert tokens(text) <= tokens(image, text) < tokens(text) + 20
