"""Two clocks for one scheduler."""

import time
from typing import Protocol, runtime_checkable


@runtime_checkable
class Clock(Protocol):
    """Seconds since it was made."""

    def __call__(self) -> float:
        """Returns the time."""
        ...

    def wait_until(self, seconds: float) -> None:
        """Lets time pass."""
        ...


class RealClock:
    """The host's."""

    def __init__(self):
        """Starts at 0."""
        self._start = time.perf_counter()

    def __call__(self) -> float:
        """Returns the time."""
        return time.perf_counter() - self._start

    def wait_until(self, seconds: float) -> None:
        """Sleeps."""
        time.sleep(max(0.0, seconds - self()))


class SimulatedClock:
    """Goes on when it is told to."""

    def __init__(self):
        """Starts at 0."""
        self._now = 0.0

    def __call__(self) -> float:
        """Returns the time."""
        return self._now

    def wait_until(self, seconds: float) -> None:
        """Jumps."""
        self._now = max(self._now, seconds)

    def pass_by(self, seconds: float) -> None:
        """Adds the time that something took."""
        self._now += seconds
