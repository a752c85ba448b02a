"""The run: phases one after the other, in each of them the targets in turn, round by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from bench.phases import Bench, Effort, Phase, Sample
from bench.stats import Bar, Judgement, Spread, differences
from bench.targets import Target

BARS = (
    Bar("CPU per small request", "small-c1", 7.5),
    Bar("CPU per small request", "small-c16", 7.5),
    Bar("CPU per small request", "small-c64", 7.5),
    Bar("CPU per chunk", "streams-c100", 3.0),
)


@dataclass(slots=True)
class Series:
    """One target in one phase: a sample for each round."""

    samples: list[Sample] = field(default_factory=list)

    def values(self, figure: str) -> list[float | None]:
        return [sample.figures.get(figure) for sample in self.samples]

    def spread(self, figure: str) -> Spread | None:
        return Spread.of(self.values(figure)) if self.samples else None

    @property
    def faults(self) -> list[str]:
        return [f"round {n}: {fault}" for n, sample in enumerate(self.samples, 1) for fault in sample.faults]


@dataclass(slots=True)
class Outcome:
    """`series` by phase and target, in the order of the run."""

    series: dict[str, dict[str, Series]] = field(default_factory=dict)

    def judge(self, bars: Sequence[Bar] = BARS) -> list[Judgement]:
        """Every bar whose phase and both targets were run. A failure on either side, or on the load side, is INVALID."""
        judged = []
        for bar in bars:
            phase = self.series.get(bar.phase, {})
            if bar.target not in phase or bar.base not in phase:
                continue
            names = [name for name in ("direct", bar.base, bar.target) if name in phase]
            faults = [f"{name} {fault}" for name in names for fault in phase[name].faults]
            judged.append(bar.judge(phase[bar.target].values("cpu_us"), phase[bar.base].values("cpu_us"), faults))
        return judged

    def added_ttft(self, phase: str, target: str, figure: str) -> Spread | None:
        """Milliseconds over direct at the same percentile, round by round."""
        series = self.series[phase]
        if target == "direct" or "direct" not in series:
            return None
        return Spread.of(differences(series[target].values(figure), series["direct"].values(figure)))


def run(
    bench: Bench,
    phases: Sequence[Phase],
    targets: Sequence[type[Target]],
    effort: Effort,
    say: Callable[[str], None],
) -> Outcome:
    """Measures everything. Whatever it started is stopped when it returns or raises."""
    outcome = Outcome()
    for phase in phases:
        series = outcome.series[phase.name] = {kind.name: Series() for kind in targets}
        with ExitStack() as stack:
            upstream, port = phase.upstream(bench)
            stack.callback(upstream.stop)
            started = []
            for kind in targets:
                target = kind(bench.folder / phase.name / kind.name, bench.gateway_core)
                stack.callback(target.stop)
                target.start(port)
                phase.warm(bench, target)
                started.append(target)
            for number in range(1, effort.rounds + 1):
                for target in started:
                    sample = settled(partial(phase.measure, bench, target, port, effort))
                    series[target.name].samples.append(sample)
                    say(_line(phase, target.name, number, sample))
    return outcome


def settled(measure: Callable[[], Sample], attempts: int = 3) -> Sample:
    """A sample that kept its pace. What is late is taken again, and how often is among its figures; what still is late
    in the last attempt is a fault. A failure is never taken again."""
    for again in range(attempts):
        sample = measure()
        sample.figures["retaken"] = again
        if sample.faults or not sample.late:
            break
    sample.faults += sample.late
    return sample


def _line(phase: Phase, target: str, number: int, sample: Sample) -> str:
    cpu = sample.figures["cpu_us"]
    cost = f"{cpu:.1f} us of CPU per {phase.operation}" if cpu is not None else "-"
    faults = f"  INVALID: {'; '.join(sample.faults)}" if sample.faults else ""
    return f"{phase.name} round {number} {target}: {cost}{faults}"
