"""Plots as inline SVG. They take their colours from the page, so they follow light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from loadtest.report.scale import Linear, Logarithmic, number
from loadtest.run import Block

_W, _LEFT, _RIGHT = 640, 74, 16


def ttft_strips(cold: Sequence[float], warm: Sequence[float]) -> str:
    """Each unloaded request as a dot over TTFT in ms, cold above warm, on a logarithmic axis."""
    axis = Logarithmic.around([*cold, *warm], _LEFT, _W - _RIGHT)
    parts = [_x_axis(axis, 112, 18, "TTFT, ms (measured, logarithmic)")]
    for y, name, values, css in ((42, "cold", cold, "off"), (82, "warm", warm, "on")):
        parts.append(_text(_LEFT - 10, y + 4, name, "end"))
        parts += [
            f'<circle class="{css}" cx="{axis.at(v):.1f}" cy="{y}" r="6" opacity=".75">'
            f"<title>{name}: {v:,.1f} ms</title></circle>"
            for v in values
        ]
    return _svg(150, "TTFT of each unloaded request, cold and warm", parts)


def ttft_cdf(arms: Mapping[str, Sequence[float]]) -> str:
    """The share of requests with a TTFT of at most x ms, one step line an arm."""
    values = [v for samples in arms.values() for v in samples]
    axis, top, bottom = Logarithmic.around(values, _LEFT, _W - _RIGHT), 14, 210
    parts = [_x_axis(axis, bottom, top, "TTFT, ms (measured, logarithmic)")]
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = bottom - (bottom - top) * share
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_W - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 10, y + 4, f"{share:.0%}", "end"))
    for arm, samples in arms.items():
        ordered = sorted(samples)
        path, y = [f"M{axis.at(ordered[0]):.1f},{bottom}"], float(bottom)
        for i, value in enumerate(ordered):
            y = bottom - (bottom - top) * (i + 1) / len(ordered)
            path.append(f"H{axis.at(value):.1f}V{y:.1f}")
        parts.append(f'<path class="line {arm}" d="{"".join(path)}H{_W - _RIGHT}"><title>cache {arm}</title></path>')
    return _svg(250, "Distribution of TTFT under load, per arm", parts)


def block_bars(blocks: Sequence[Block]) -> str:
    """Requests a second in each block of time, in the order in which they ran."""
    rates = [sum(o.ok for o in b.outcomes) / b.seconds if b.seconds else 0.0 for b in blocks]
    top, bottom = 26, 190
    axis = Linear(max(*rates, 1e-9) * 1.05, bottom, top)
    parts = []
    for tick in axis.ticks():
        y = axis.at(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_W - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 10, y + 4, number(tick), "end"))
    width = (_W - _RIGHT - _LEFT) / len(blocks)
    for i, (block, rate) in enumerate(zip(blocks, rates, strict=True)):
        x, y = _LEFT + i * width + width * 0.2, axis.at(rate)
        parts.append(
            f'<rect class="{block.arm}" x="{x:.1f}" y="{y:.1f}" width="{width * 0.6:.1f}" height="{bottom - y:.1f}"/>'
        )
        parts.append(_text(x + width * 0.3, y - 6, f"{rate:.2f}", "middle"))
        parts.append(_text(x + width * 0.3, bottom + 18, f"{i + 1}: {block.arm}, {block.seconds:.0f} s", "middle"))
    parts.append(_text(_LEFT, 12, "requests/s (measured)", "start"))
    return _svg(222, "Throughput in each block of time", parts)


def timeline(block: Block, limit: int = 60) -> str:
    """Each request as a bar from send to first token (light) and on to its end (full), in the order of sending."""
    shown = sorted(block.outcomes, key=lambda o: o.sent_ns)[:limit]
    seconds = max((o.end_ns - block.start_ns) / 1e9 for o in shown)
    axis, row = Linear(max(seconds, 1e-6), _LEFT, _W - _RIGHT), 7
    bottom = 12 + row * len(shown)
    parts = [_x_axis(axis, bottom, 8, "seconds from the start of the block (measured)")]
    for i, o in enumerate(shown):
        y = 10 + row * i
        sent, end = (axis.at(max(0.0, (t - block.start_ns) / 1e9)) for t in (o.sent_ns, o.end_ns))
        first = end if o.first_ns is None else axis.at((o.first_ns - block.start_ns) / 1e9)
        css = o.arm if o.ok else "bad"
        parts.append(_bar(f"{css} wait", sent, first, y) + _bar(css, first, end, y))
    parts.append(
        _text(_LEFT - 10, 20, f"{len(shown)} of", "end") + _text(_LEFT - 10, 36, f"{len(block.outcomes)}", "end")
    )
    return _svg(bottom + 38, f"Timeline of requests, cache {block.arm}", parts)


def _bar(css: str, left: float, right: float, y: int) -> str:
    return f'<rect class="{css}" x="{left:.1f}" y="{y}" width="{max(0.0, right - left):.1f}" height="5"/>'


def _x_axis(axis: Linear | Logarithmic, bottom: float, top: float, title: str) -> str:
    lines = []
    for tick in axis.ticks():
        x = axis.at(tick)
        lines.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        lines.append(_text(x, bottom + 16, number(tick), "middle"))
    lines.append(_text(_W - _RIGHT, bottom + 33, title, "end"))
    return "".join(lines)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_W} {height:.0f}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
