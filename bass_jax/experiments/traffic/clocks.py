"""The clocks of the host loop: real time and simulated time."""

import time
from typing import Protocol, runtime_checkable


@runtime_checkable
class Clock(Protocol):
    """Counts seconds since it was made."""

    def __call__(self) -> float:
        """Returns the time."""
        ...

    def wait_until(self, seconds: float) -> None:
        """Returns at that time, or immediately if it has passed."""
        ...


class RealClock:
    """The clock of the host."""

    def __init__(self):
        """Starts at 0."""
        self._start = time.perf_counter()

    def __call__(self) -> float:
        """Returns the time."""
        return time.perf_counter() - self._start

    def wait_until(self, seconds: float) -> None:
        """Sleeps until that time."""
        time.sleep(max(0.0, seconds - self()))


class SimulatedClock:
    """A clock that is advanced by its user."""

    def __init__(self):
        """Starts at 0."""
        self._now = 0.0

    def __call__(self) -> float:
        """Returns the time."""
        return self._now

    def wait_until(self, seconds: float) -> None:
        """Advances to that time."""
        self._now = max(self._now, seconds)

    def advance(self, seconds: float) -> None:
        """Advances by a duration."""
        self._now += seconds
