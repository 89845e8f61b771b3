"""Serves requests at their arrival times, on a real or a simulated clock."""

import time
from collections.abc import Callable, Sequence

from bass_jax.engine import Loop, RequestHandle


class RealClock:
    """The clock of the host; it starts at 0."""

    def __init__(self):
        self._start = time.perf_counter()

    def __call__(self) -> float:
        """Returns the time in seconds."""
        return time.perf_counter() - self._start

    def wait_until(self, seconds: float) -> None:
        """Sleeps until that time."""
        time.sleep(max(0.0, seconds - self()))


class SimulatedClock:
    """A clock that its user advances; it starts at 0."""

    def __init__(self):
        self._now = 0.0

    def __call__(self) -> float:
        """Returns the time in seconds."""
        return self._now

    def wait_until(self, seconds: float) -> None:
        """Advances to that time."""
        self._now = max(self._now, seconds)

    def advance(self, seconds: float) -> None:
        """Advances by a duration."""
        self._now += seconds


def drive(
    loop: Loop, clock: RealClock | SimulatedClock, times: Sequence[float], submit: Callable[[int], RequestHandle]
) -> list[RequestHandle]:
    """Serves requests that arrive at `times` (seconds, ascending); returns the finished handles in that order.

    A request that arrives during a step joins the queue after the step. Its waiting time starts at its arrival.

    Args:
        loop: an idle loop with the same clock.
        clock: real or simulated.
        times: of the arrivals.
        submit: makes and submits the request of an index.
    """
    handles: list[RequestHandle] = []

    def submit_arrived() -> None:
        while len(handles) < len(times) and times[len(handles)] <= clock():
            arrived = float(times[len(handles)])
            handles.append(submit(len(handles)))
            handles[-1].times.submitted = arrived

    loop.intake = submit_arrived
    while len(handles) < len(times) or not loop.is_idle:
        submit_arrived()
        if not loop.advance() and len(handles) < len(times):
            clock.wait_until(float(times[len(handles)]))
    return handles
