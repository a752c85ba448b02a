"""A clock that stands until a test moves it."""


class Clock:
    """Seconds; called like time.monotonic."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
