"""python -m bench index: CPU of finding out what 64 replicas hold of a prompt, and of choosing one of them.

Every prompt is measured once and was never seen before: it ends in text of its own, and is a new object. What its beginning
hits is stored under a mesh of replicas, in blocks of 16 tokens (the smallest, so the most steps), inside an index with a fleet's
worth of other blocks, so that memory is as cold as in service. The choice is the policy `cost` over all replicas.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench import environment
from kvcache.index import PrefixIndex
from server.exchange.upstream import EnginePool
from server.replica import EngineUrl, Replica
from server.routing.asked import Asked
from server.routing.cost import CostPolicy

REPLICAS = 64
BLOCK = 16  # tokens
AIM = {1024: 50.0, 8192: 150.0, 131072: 5000.0}  # µs, median
LIMIT = {1024: 100.0, 8192: 500.0, 131072: 5000.0}  # µs, 99th percentile
PROMPTS = {1024: 200, 8192: 60, 131072: 8}
BACKGROUND = 100_000  # blocks of other prompts
METRICS = b"""
vllm:request_prefill_kv_computed_tokens_sum %d
vllm:request_prefill_kv_computed_tokens_count %d
vllm:request_prefill_time_seconds_sum %f
"""
OUT = Path("docs/results/index.json")


@dataclass(frozen=True, slots=True)
class Row:
    """CPU of this thread in µs: matching alone, and matching and choosing."""

    case: str
    tokens: int
    prompts: int
    hit_share: float
    match_p50_us: float
    both_p50_us: float
    both_p99_us: float
    aim_us: float
    limit_us: float

    @property
    def verdict(self) -> str:
        return "pass" if self.both_p50_us <= self.aim_us and self.both_p99_us <= self.limit_us else "fail"


def text_blocks(count: int, seed: str) -> list[bytes]:
    """Blocks of 16 words, as text has them: of 40 to 90 bytes."""
    words = random.Random(seed)
    return [
        b"".join(b" " + words.randbytes(words.randint(1, 2)).hex().encode() for _ in range(BLOCK)) for _ in range(count)
    ]


def store(index: PrefixIndex, replica: str, blocks: Sequence[bytes], first_hash: int, base: Sequence[int] = ()) -> None:
    hashes = [*base, *range(first_hash, first_hash + len(blocks) - len(base))]
    for at in range(0, len(blocks), 512):
        index.store(
            replica,
            hashes[at : at + 512],
            parent=hashes[at - 1] if at else None,
            blocks=blocks[at : at + 512],
            block_size=BLOCK,
        )


class Fleet:
    """An index of 64 replicas, and the load that a choice weighs."""

    def __init__(self, background: int = BACKGROUND) -> None:
        self.index, self.hashes = PrefixIndex(), 1 << 40
        self.random = random.Random(1)
        self.replicas = [self._replica(n) for n in range(REPLICAS)]
        self.names = [replica.name for replica in self.replicas]
        self.policy = CostPolicy()
        for name in self.names:
            self.index.add(name, 200_000)
        for n in range(background // 500):
            self.hold(self.random.sample(self.names, 1), text_blocks(500, f"background {n}"))

    def _replica(self, number: int) -> Replica:
        """One that was measured and has work."""
        host = f"10.0.0.{number + 1}"
        replica = Replica(EngineUrl("http", host, 8000), EnginePool(host, 8000, tls=False))
        replica.kv_tokens, replica.kv_utilization = 200_000 * BLOCK, self.random.random() * 0.8
        for tokens in (1, 1_000_000):
            seconds = tokens / self.random.randrange(5_000, 9_000)
            replica.prefill.observe(METRICS % (tokens, tokens // 1000, seconds))
        for _ in range(8):
            replica.work.begin(self.random.randrange(4_000), 4_000, due=float("inf"))
        return replica

    def hold(self, names: Sequence[str], blocks: list[bytes]) -> None:
        for name in names:
            store(self.index, name, blocks, self.hashes)
        self.hashes += len(blocks)

    def prompt(self, case: str, tokens: int, n: int) -> bytes:
        """Text of `tokens` tokens that ends in three blocks nobody has. "all": every replica holds the rest; "mesh": each a
        part of its own of it; "none": nobody holds anything; "branching": each block has siblings of many lengths."""
        blocks = text_blocks(tokens // BLOCK - 3, f"{case} {tokens} {n}")
        if case == "all":
            self.hold(self.names, blocks)
        elif case == "mesh":
            for name in self.names[:-1]:
                self.hold([name], blocks[: self.random.randint(1, len(blocks))])
            self.hold(self.names[-1:], blocks)
        elif case == "branching":
            self.hold(self.names[:8], blocks)
            for at in range(0, len(blocks), max(1, len(blocks) // 64)):
                for width in range(1, 40, 3):
                    self.hold(self.names[8:9], [*blocks[:at], blocks[at][:width] + b"~"])
        return b"".join([*blocks, *text_blocks(3, f"tail {case} {tokens} {n}")])

    def choose(self, prompt: bytes, tokens: int) -> str:
        """The replica that the prompt goes to."""
        asked = Asked(tokens, 256, prompt=prompt, match=self.index.match(prompt))
        return self.policy.choose(self.replicas, asked).name


def cpu_us(work: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - began) / 1000


def measure(fleet: Fleet, case: str, tokens: int, count: int) -> Row:
    prompts = [fleet.prompt(case, tokens, n) for n in range(count)]
    index = fleet.index
    gc.collect()
    gc.freeze()
    fleet.random.shuffle(prompts)
    half = len(prompts) // 2
    hits = []
    alone = []
    for prompt in prompts[:half]:
        alone.append(cpu_us(lambda prompt=prompt: hits.append(index.match(prompt).available)))  # type: ignore[misc]
    both = [cpu_us(lambda p=prompt: fleet.choose(p, tokens)) for prompt in prompts[half:]]  # type: ignore[misc]
    return Row(
        case,
        tokens,
        len(both),
        round(sum(hits) / len(hits) / tokens, 3),
        round(percentile(alone, 50), 1),
        round(percentile(both, 50), 1),
        round(percentile(both, 99), 1),
        AIM[tokens],
        LIMIT[tokens],
    )


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def memory() -> tuple[float, float]:
    """Bytes for a block with its first holder, and for one more holder."""
    blocks = text_blocks(20_000, "memory")
    index, grown = PrefixIndex(), []
    for name in ("a", "b"):
        index.add(name, len(blocks))
        tracemalloc.start()
        store(index, name, [bytes(bytearray(block)) for block in blocks], 1 << 62)
        grown.append(tracemalloc.get_traced_memory()[0] / len(blocks))
        tracemalloc.stop()
    return round(grown[0], 1), round(grown[1], 1)


def markdown(rows: Sequence[Row], held: tuple[float, float], where: dict[str, object]) -> str:
    lines = [
        "# Finding and choosing a replica: CPU on the request path",
        "",
        f"Measured {where['date']} at commit `{where['commit']}`"
        + (" with uncommitted changes" if where["dirty"] else "")
        + f", {where['cpu']}, Python {where['python']}. Made by `python -m bench index`.",
        "",
        f"{REPLICAS} replicas, blocks of {BLOCK} tokens, {BACKGROUND:,} other blocks in the index. Each prompt is matched once",
        "and ends in text nobody has. `all`: every replica holds the rest; `mesh`: each another part of it; `branching`: many",
        "of its blocks have siblings of 13 lengths; `none`: nothing hits. CPU of the thread in µs; the choice is the policy",
        "`cost` over all replicas.",
        "",
        "| prompts | tokens | measured | hit share | match p50 | match + choice p50 | p99 | aim p50 | limit p99 | |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {row.case} | {row.tokens:,} | {row.prompts} | {row.hit_share} | {row.match_p50_us} | {row.both_p50_us} "
            f"| {row.both_p99_us} | {row.aim_us:.0f} | {row.limit_us:.0f} | {row.verdict} |"
            for row in rows
        ),
        "",
        f"Memory (tracemalloc): {held[0]} B for a block with its first holder, its text included; {held[1]} B for each",
        "further holder.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parse = argparse.ArgumentParser(prog="python -m bench index", description=__doc__.splitlines()[0])
    parse.add_argument(
        "--quick", action="store_true", help="a tenth of the prompts, little else in the index, nothing written"
    )
    parse.add_argument("--out", type=Path, default=OUT, help="JSON file; the Markdown page lies beside it as .md")
    given = parse.parse_args(arguments)
    fleet = Fleet(2_000 if given.quick else BACKGROUND)
    rows = []
    for case in ("none", "all", "mesh", "branching"):
        for tokens, count in PROMPTS.items():
            if case == "branching" and tokens > 8192:
                continue
            rows.append(measure(fleet, case, tokens, max(4, count // (10 if given.quick else 1))))
            print(rows[-1], rows[-1].verdict, file=sys.stderr, flush=True)
    page = given.out.with_suffix(".md")
    where: dict[str, object] = {
        "commit": environment.commit(),
        "dirty": environment.dirty([given.out, page]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": environment.cpu_model(),
        "python": platform.python_version(),
    }
    held = memory()
    if not given.quick:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        result = {
            "schema": 1,
            "suite": "index",
            "environment": where,
            "rows": [asdict(row) | {"verdict": row.verdict} for row in rows],
        }
        result["memory_bytes"] = {"first_holder": held[0], "further_holder": held[1]}
        given.out.write_text(json.dumps(result, indent=1) + "\n")
        page.write_text(markdown(rows, held, where))
    print(markdown(rows, held, where))
    return 0 if all(row.verdict == "pass" for row in rows) else 1
