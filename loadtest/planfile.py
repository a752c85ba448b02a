"""plan.jsonl: a header line with the parameters, then one line a request. Ids are not stored: the header expands to
them, and each line carries their sha256."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from kvgate.errors import UsageError
from loadtest.plan import Phase, Plan, PlannedRequest, Shape
from loadtest.schedule import ClosedLoop, Load, OpenLoop
from loadtest.vocabulary import Vocabulary

KIND = "kvgate-loadtest-plan/1"


def plan_bytes(plan: Plan) -> bytes:
    header = {
        "kind": KIND,
        "seed": plan.seed,
        "vocab": str(plan.vocabulary),
        "load": load_document(plan.load),
        "phases": {phase: asdict(shape) for phase, shape in plan.shapes.items()},
    }
    return b"".join(orjson.dumps(line) + b"\n" for line in (header, *(asdict(r) for r in plan.requests)))


def plan_sha256(plan: Plan) -> str:
    return hashlib.sha256(plan_bytes(plan)).hexdigest()


def write_plan(plan: Plan, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(plan_bytes(plan))


def read_plan(path: Path) -> Plan:
    """Raises UsageError when the file is missing, cut off or of another kind."""
    try:
        first, *rest = path.read_bytes().splitlines()
        header = orjson.loads(first)
        if header.get("kind") != KIND:
            raise UsageError(f"--plan {path}: not a {KIND} file")
        shapes: dict[Phase, Shape] = {phase: Shape(**shape) for phase, shape in header["phases"].items()}
        requests = tuple(PlannedRequest(**orjson.loads(line)) for line in rest)
        plan = Plan(header["seed"], Vocabulary.parse(header["vocab"]), shapes, _load(header["load"]), requests)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--plan {path}: {error}") from error
    if len(requests) != sum(shape.requests for shape in shapes.values()):
        raise UsageError(f"--plan {path}: {len(requests)} requests, the header promises more or fewer; write it again")
    return plan


def load_document(load: Load) -> dict[str, Any]:
    if isinstance(load, ClosedLoop):
        return {"kind": "closed", "concurrency": load.concurrency}
    return {"kind": "open", "arrivals": load.arrivals, "rate": load.rate}


def _load(document: dict[str, Any]) -> Load:
    if document["kind"] == "closed":
        return ClosedLoop(document["concurrency"])
    return OpenLoop(document["arrivals"], document["rate"])
