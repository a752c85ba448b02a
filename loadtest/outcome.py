"""What became of one request. Failed ones stay in every count: dropping them would flatter the numbers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from loadtest.plan import PlannedRequest

Arm = Literal["off", "on"]


class ResultClass(StrEnum):
    OK = "ok"
    REFUSED = "refused"  # no connection
    HTTP_ERROR = "http_error"  # an answer other than 200
    STREAM_ERROR = "stream_error"  # an error event inside a stream
    BROKEN_STREAM = "broken_stream"  # ended without the terminal event
    NO_CONTENT = "no_content"  # ended well, and said nothing
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times are perf_counter_ns of this process. A token count that the server did not report is None, never 0.

    planned_ns: when the request was due (closed loop: when its slot became free). sent_ns: when its head was written,
    after any connect. first_ns: first content. end_ns: terminal event, or the failure. itl_ns: one gap a token.
    """

    request: PlannedRequest
    arm: Arm
    block: int
    result: ResultClass
    planned_ns: int
    sent_ns: int
    first_ns: int | None
    end_ns: int
    itl_ns: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    new_connection: bool = False
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.result is ResultClass.OK

    @property
    def service_ttft_ms(self) -> float | None:
        """From send to first content."""
        return None if self.first_ns is None else (self.first_ns - self.sent_ns) / 1e6

    @property
    def schedule_ttft_ms(self) -> float | None:
        """From the planned time to first content: what a user who came at that time waits."""
        return None if self.first_ns is None else (self.first_ns - self.planned_ns) / 1e6

    @property
    def send_lag_ms(self) -> float:
        return (self.sent_ns - self.planned_ns) / 1e6

    @property
    def e2e_ms(self) -> float:
        return (self.end_ns - self.sent_ns) / 1e6
