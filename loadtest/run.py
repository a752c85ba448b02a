"""One run: warm up, prove that the on-arm starts cold, measure unloaded and loaded, read the engine's counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import aiohttp

from kvgate.errors import SetupError
from loadtest.arms import Loader, SaltSource, fresh_salt
from loadtest.client import Client, Shot, Target
from loadtest.driver import closed_loop, open_loop
from loadtest.engine import Counters, Engine, EngineFacts
from loadtest.looplag import LoopLag
from loadtest.models import choose, served_models
from loadtest.outcome import Arm, Outcome, ResultClass
from loadtest.plan import Phase, Plan
from loadtest.progress import Progress
from loadtest.schedule import ClosedLoop, Load


@dataclass(frozen=True, slots=True)
class Canary:
    """The first use of a group's prefix under a salt (`first`: must find nothing) or a second one (must hit)."""

    phase: Phase
    block: int
    group: int
    first: bool
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of time under one arm (`mixed`: the unloaded phase, which alternates by request)."""

    index: int
    phase: Phase
    arm: Arm | None
    start_ns: int
    end_ns: int
    outcomes: tuple[Outcome, ...]
    before: Counters | None
    after: Counters | None
    loop_lag_ms: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True, slots=True)
class Run:
    """All that was measured, before any judgement."""

    plan: Plan
    facts: EngineFacts
    arms: tuple[Arm, ...]
    blocks: tuple[Block, ...]
    canaries: tuple[Canary, ...]

    def of(self, phase: Phase, arm: Arm | None = None) -> list[Outcome]:
        found = [o for block in self.blocks if block.phase == phase for o in block.outcomes]
        return [o for o in found if arm is None or o.arm == arm]


class Runner:
    """Runs a plan against a target. `engine_metrics` are the engines' own pages, for counters and configuration."""

    def __init__(
        self,
        plan: Plan,
        target: Target,
        *,
        engine_metrics: Sequence[str] = (),
        engine_url: str | None = None,
        blocks: Sequence[Arm] = ("off", "on", "on", "off"),
        progress: Progress | None = None,
        salts: SaltSource = fresh_salt,
        settle_s: float = 0.2,
    ) -> None:
        self._plan = plan
        self._target = target
        self._metrics = tuple(engine_metrics)
        self._engine_url = engine_url
        self._arms = tuple(blocks)
        self._progress = progress or Progress()
        self._salts = salts
        self._settle_s = settle_s
        self._loader = Loader(plan, "", salts)
        self._blocks: list[Block] = []
        self._canaries: list[Canary] = []

    async def run(self) -> Run:
        # the engines get a session of their own: the key is the target's, not theirs
        async with Client(self._target) as client, aiohttp.ClientSession() as metrics:
            model = choose(await served_models(client.session, self._target.url), self._target.model, self._plan)
            self._loader = Loader(self._plan, model, self._salts)
            engine = Engine(metrics, self._metrics, self._engine_url, self._settle_s)
            facts = await engine.facts(model)
            if "unloaded" in self._plan.shapes:
                await self._warm_up(client, "unloaded")
                await self._unloaded(client, engine)
            if "loaded" in self._plan.shapes:
                await self._warm_up(client, "loaded")
                for arm in self._arms:
                    await self._loaded(client, engine, arm)
        arms = tuple(dict.fromkeys(self._arms))
        return Run(self._plan, facts, arms, tuple(self._blocks), tuple(self._canaries))

    async def _warm_up(self, client: Client, phase: Phase) -> None:
        """A request of the phase's length with a prompt and a salt of its own: it heats the engine and no prefix."""
        ids = self._plan.warmup(phase)
        outcome = await client.send(self._loader.bare(phase, ids, -1, self._loader.salts()), perf_counter_ns())
        if outcome.result in (ResultClass.REFUSED, ResultClass.HTTP_ERROR):
            raise SetupError(f"--url {self._target.url}: the warm-up request failed: {outcome.detail}")

    async def _prime(self, client: Client, phase: Phase, block: int, salt: str) -> None:
        """Each group's prefix once, outside the window; that first use is the canary. Then one second use."""
        groups = self._plan.shapes[phase].groups
        for group in (*range(groups), 0):
            first = not any(c.group == group and c.block == block for c in self._canaries)
            shot = self._loader.bare(phase, self._plan.prefix(phase, group), group, salt)
            outcome = await client.send(shot, perf_counter_ns())
            self._canaries.append(Canary(phase, block, group, first, outcome))

    async def _unloaded(self, client: Client, engine: Engine) -> None:
        """Pairs of the same prompt, cold (a fresh salt) and warm (primed): cold first, then warm first, and so on."""
        index, salt, loader = len(self._blocks), self._loader.salts(), self._loader
        await self._prime(client, "unloaded", index, salt)
        shots: list[Shot] = []
        for n, request in enumerate(self._plan.of("unloaded")):
            pair = [loader.shot(request, "off", index, loader.salts()), loader.shot(request, "on", index, salt)]
            shots += pair if n % 2 == 0 else reversed(pair)
        await self._window(client, engine, "unloaded", None, shots, ClosedLoop(1), "unloaded, cold and warm in turn")

    async def _loaded(self, client: Client, engine: Engine, arm: Arm) -> None:
        index, salt = len(self._blocks), self._loader.salts()
        if arm == "on":
            await self._prime(client, "loaded", index, salt)
        shots = self._loader.block("loaded", arm, index, salt)
        await self._window(client, engine, "loaded", arm, shots, self._plan.load, f"loaded, prefix caching {arm}")

    async def _window(
        self,
        client: Client,
        engine: Engine,
        phase: Phase,
        arm: Arm | None,
        shots: list[Shot],
        load: Load,
        title: str,
    ) -> None:
        before = await engine.settled()
        await client.warm_pool(load.concurrency if isinstance(load, ClosedLoop) else 16)
        self._progress.begin(title, len(shots))
        async with LoopLag() as lag:
            start = perf_counter_ns()
            if isinstance(load, ClosedLoop):
                outcomes = await closed_loop(shots, load.concurrency, client, self._progress.advance)
            else:
                outcomes = await open_loop(shots, client, self._progress.advance)
            end = max((o.end_ns for o in outcomes), default=start)
        self._progress.end()
        after = await engine.settled()
        # an open loop's window begins when its first request is due, a little after the start
        start = min((o.planned_ns for o in outcomes), default=start)
        block = Block(len(self._blocks), phase, arm, start, end, tuple(outcomes), before, after, tuple(lag.samples_ms))
        self._blocks.append(block)
