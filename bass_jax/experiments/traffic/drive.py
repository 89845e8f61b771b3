"""Submits requests to a loop at their arrival times, on either clock."""

from collections.abc import Callable, Sequence

from bass_jax.engine import Loop, RequestHandle
from bass_jax.experiments.traffic.clocks import Clock


def drive(
    loop: Loop, clock: Clock, times: Sequence[float], submit: Callable[[int], RequestHandle]
) -> list[RequestHandle]:
    """Serves requests that arrive at `times`.

    A request that arrives during a step joins the queue after the step. Its waiting time starts at its arrival.

    Args:
        loop: an idle loop with the same clock.
        clock: real or simulated.
        times: seconds, ascending.
        submit: makes and submits the request of an index.

    Returns:
        The finished handles, in the order of `times`.
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
