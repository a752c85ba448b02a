"""What a run must keep to be VALID."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """send_lag_ms, loop_lag_ms: 99th percentile (the maximum under 100 samples) in milliseconds. error_rate: failed /
    all. offered: achieved / planned rate of an open loop."""

    send_lag_ms: float = 50.0
    loop_lag_ms: float = 50.0
    error_rate: float = 0.01
    offered: float = 0.99
