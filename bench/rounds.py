"""The run: phases one after the other, in each of them the targets in turn, round by round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from bench import upstreams
from bench.faults import Finding
from bench.phases import Bench, Effort, Phase, Sample
from bench.process import ROOT
from bench.stats import Bar, Judgement, Spread, differences
from bench.targets import Launch, Target
from kvgate.errors import SetupError

Say = Callable[[str], None]


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
    """`series` by phase and target, in the order of the run; `absent` says why a target did not start in a phase.
    `findings` are those of the checks with failing engines, by target and check."""

    series: dict[str, dict[str, Series]] = field(default_factory=dict)
    absent: dict[str, dict[str, str]] = field(default_factory=dict)
    findings: dict[str, dict[str, Finding]] = field(default_factory=dict)

    def judge(self, bars: Sequence[Bar]) -> list[Judgement]:
        """Every bar whose phase and both targets were chosen. A failure on either side, or on the load side, is INVALID,
        and so is a side that did not start: there is nothing to compare with."""
        judged = []
        for bar in bars:
            phase, absent = self.series.get(bar.phase, {}), self.absent.get(bar.phase, {})
            sides = (bar.base, bar.target)
            if not all(name in phase or name in absent for name in sides):
                continue
            faults = [f"{name} did not start" for name in sides if name in absent]
            faults += [
                f"{name} {fault}" for name in ("direct", *sides) if name in phase for fault in phase[name].faults
            ]
            values, base = (phase[name].values(bar.figure) if name in phase else [] for name in (bar.target, bar.base))
            judged.append(bar.judge(values, base, faults))
        return judged

    def added_ttft(self, phase: str, target: str, figure: str) -> Spread | None:
        """Milliseconds over direct at the same percentile, round by round."""
        series = self.series[phase]
        if target == "direct" or "direct" not in series:
            return None
        return Spread.of(differences(series[target].values(figure), series["direct"].values(figure)))


def run(
    bench: Bench, phases: Sequence[Phase], targets: Mapping[str, Launch], backends: int, effort: Effort, say: Say
) -> Outcome:
    """Measures everything. Whatever it started is stopped when it returns or raises."""
    outcome = Outcome()
    for phase in phases:
        series = outcome.series[phase.name] = {}
        absent = outcome.absent[phase.name] = {}
        folder = bench.folder / phase.name
        with ExitStack() as stack:
            ports = stack.enter_context(upstreams.running(phase.upstream, backends, folder, bench.load_core))
            started = []
            for name, launch in targets.items():
                target = launch(folder / name.replace("/", "-"), bench.gateway_core)
                stack.callback(target.stop)
                if (reason := _start(target, ports)) is not None:
                    absent[name] = _brief(reason, bench)
                    say(f"{phase.name} {name} did not start: {reason}")
                    continue
                phase.warm(bench, target)
                series[name] = Series()
                started.append(target)
            for number in range(1, effort.rounds + 1):
                for target in started:
                    sample = settled(partial(phase.measure, bench, target, ports, effort), target.attempts)
                    series[target.name].samples.append(sample)
                    say(_line(phase, target.name, number, sample))
    return outcome


def _start(target: Target, ports: Sequence[int]) -> str | None:
    """Why it did not start, where the run can do without it. SetupError otherwise."""
    try:
        target.start(ports)
    except SetupError as error:
        if not target.optional:
            raise
        target.stop()
        return str(error)
    return None


def _brief(reason: str, bench: Bench) -> str:
    """What happened and the last line of the log, without the folders of this machine."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    text = " … ".join(dict.fromkeys((lines[0], lines[-1])))
    return text.replace(str(ROOT), ".").replace(str(bench.folder), "")


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
