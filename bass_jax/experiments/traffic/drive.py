"""Lets requests come to a loop as a workload says, on either clock."""

from collections.abc import Callable, Sequence

from bass_jax.engine import Loop, RequestHandle
from bass_jax.experiments.traffic.clocks import Clock


def drive(
    loop: Loop, clock: Clock, times: Sequence[float], submit: Callable[[int], RequestHandle]
) -> list[RequestHandle]:  # fmt: skip
    """Serves requests that come at `times`.

    A request that comes while a step is in flight joins the queue when the step has ended, and has waited since it
    came.

    Args:
        loop: idle; its clock is `clock`.
        clock: simulated or real.
        times: seconds, ascending.
        submit: makes and submits the request of an index.

    Returns:
        The handles, finished, in the order of `times`.
    """
    handles: list[RequestHandle] = []

    def submit_due() -> None:
        while len(handles) < len(times) and times[len(handles)] <= clock():
            due = float(times[len(handles)])
            handles.append(submit(len(handles)))
            handles[-1].times.submitted = due

    loop.intake = submit_due
    while len(handles) < len(times) or not loop.is_idle:
        submit_due()
        if not loop.advance() and len(handles) < len(times):
            clock.wait_until(float(times[len(handles)]))
    return handles
