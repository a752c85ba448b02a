"""What a target makes of engines that fail: requests answered with 500, a dead engine, a stream that breaks off.

Each check starts the target anew, since a target may remember faults. Loops are bounded in count and in time.
"""

from __future__ import annotations

import http.client
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from bench import faulty, payloads
from bench.process import LOOPBACK, Child, fetch, free_port
from bench.streams import END
from bench.targets import Direct, Launch, Target
from kvgate.errors import SetupError

FAILING, INNOCENT, AFTER_DEATH = 4, 20, 40
RETURN_SECONDS = 15.0  # how long a check waits for a returned engine to be used again
SOON = 5.0  # what counts as within seconds


@dataclass(frozen=True, slots=True)
class Finding:
    """`text` is what was seen; `ok` is whether a gateway may behave so."""

    text: str
    ok: bool


class Engines:
    """Two faulty upstreams that can be killed and started again on their ports."""

    def __init__(self, folder: Path, core: int, stack: ExitStack) -> None:
        self._folder, self._core = folder, core
        self.ports = [free_port(), free_port()]
        self._children: list[Child | None] = [None, None]
        folder.mkdir(parents=True, exist_ok=True)
        stack.callback(self.stop)
        for number in range(2):
            self.start(number)

    def start(self, number: int) -> None:
        command = [sys.executable, "-m", "bench.faulty", str(self.ports[number])]
        child = Child("the faulty upstream", command, self._core, self._folder / f"upstream-{number}.log")
        self._children[number] = child
        child.wait_until_ready(self.ports[number], "/health")

    def kill(self, number: int) -> None:
        if (child := self._children[number]) is not None:
            child.stop()
            self._children[number] = None

    def stop(self) -> None:
        for number in range(2):
            self.kill(number)

    def served(self, number: int) -> int:
        """Chat requests since its start."""
        return int(fetch(self.ports[number], "GET", faulty.COUNT)[1])


def ask(target: Target, prompt: str) -> int:
    """The status of a request, 0 if none came."""
    try:
        return fetch(target.port, "POST", payloads.CHAT, faulty.request(prompt), 30.0, payloads.KEY)[0]
    except (OSError, http.client.HTTPException):
        return 0


def failing_requests(target: Target, engines: Engines) -> Finding:
    for _ in range(FAILING):
        ask(target, faulty.FAIL)
    answered = sum(ask(target, faulty.INNOCENT) == 200 for _ in range(INNOCENT))
    return Finding(f"{answered} of {INNOCENT} answered", answered == INNOCENT)


def dead_engine(target: Target, engines: Engines) -> Finding:
    for _ in range(4):  # so that connections to both are open
        ask(target, faulty.INNOCENT)
    engines.kill(0)
    answered = sum(ask(target, faulty.INNOCENT) == 200 for _ in range(AFTER_DEATH))
    engines.start(0)
    returned, began = None, time.monotonic()
    while returned is None and (waited := time.monotonic() - began) < RETURN_SECONDS:
        ask(target, faulty.INNOCENT)
        if engines.served(0):
            returned = waited
        time.sleep(0.1)
    back = f"back after {returned:.1f} s" if returned is not None else f"not back after {RETURN_SECONDS:g} s"
    ok = answered == AFTER_DEATH and returned is not None and returned <= SOON
    return Finding(f"{answered} of {AFTER_DEATH} answered, {back}", ok)


def cut_stream(target: Target, engines: Engines) -> Finding:
    body = faulty.request(faulty.CUT, stream=True)
    head = f"POST {payloads.CHAT} HTTP/1.1\r\nhost: {LOOPBACK}\r\nauthorization: Bearer {payloads.KEY}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    came, ended = bytearray(), "a terminal chunk"
    with closing(socket.create_connection((LOOPBACK, target.port), timeout=10.0)) as connection:
        connection.sendall(head.encode() + body)
        try:
            while not came.endswith(END):
                data = connection.recv(65536)
                if not data:
                    ended = "the end of the connection"
                    break
                came += data
        except TimeoutError:
            ended = "nothing for 10 s"
        except ConnectionError:
            ended = "a reset"
    done, error = b"data: [DONE]" in came, b'"error"' in came
    signs = [sign for sign, seen in (("an error event", error), ("[DONE]", done)) if seen]
    whole = done or (ended == "a terminal chunk" and not error)
    return Finding(" and ".join([*signs, ended]), not whole and ended != "nothing for 10 s")


CHECKS: Mapping[str, Callable[[Target, Engines], Finding]] = {
    "after 4 failing requests": failing_requests,
    "one of two engines dead": dead_engine,
    "a stream cut by the engine ends in": cut_stream,
}


def run(
    folder: Path, cores: tuple[int, int], targets: Mapping[str, Launch], say: Callable[[str], None]
) -> dict[str, dict[str, Finding]]:
    """Findings by target and check. What does not start has none."""
    findings: dict[str, dict[str, Finding]] = {}
    for name, launch in targets.items():
        if name == Direct.name:
            continue
        found = findings[name] = {}
        for number, (check, look) in enumerate(CHECKS.items()):
            with ExitStack() as stack:
                own = folder / f"{name.replace('/', '-')}-{number}"
                engines = Engines(own, cores[0], stack)
                target = launch(own / "target", cores[1])
                stack.callback(target.stop)
                try:
                    target.start(engines.ports)
                except SetupError as error:
                    if not target.optional:
                        raise
                    say(f"faults {name} did not start: {error}")
                    break
                found[check] = look(target, engines)
                say(f"faults {name}, {check}: {found[check].text}")
    return findings


def shortfalls(findings: Mapping[str, Mapping[str, Finding]], name: str | None) -> list[str]:
    """What `name` must not do and did."""
    found = findings.get(name, {}) if name else {}
    return [f"{name}, {check}: {finding.text}" for check, finding in found.items() if not finding.ok]


def table(findings: Mapping[str, Mapping[str, Finding]]) -> list[str]:
    """Markdown lines; what a gateway must not do is bold."""
    lines = [f"| target | {' | '.join(CHECKS)} |", "|---" * (len(CHECKS) + 1) + "|"]
    for name, found in findings.items():
        cells = [
            "did not start"
            if check not in found
            else found[check].text
            if found[check].ok
            else f"**{found[check].text}**"
            for check in CHECKS
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines
