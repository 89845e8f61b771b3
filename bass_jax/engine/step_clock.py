"""Measures steps, for policies that choose the draft length by time."""

import jax
import numpy as np

from bass_jax.decoding.policy_runner import StepTimes
from bass_jax.runtime.jit_cache import CompiledFunction

WEIGHT = 0.2
"""Weight of a new measurement in the estimate."""


class StepClock:
    """Estimates the time of a step of each draft length for one batch size.

    The estimates are stored with the compiled steps, so that later runs of the process start from them. A change that
    affects all lengths, such as a longer context or a busier machine, is seen only in the length that is in use;
    therefore half of every change of its estimate is added to the estimates of the others.

    The time of a step that follows compilation, or steps without drafts, is not the time of a usual step: the first
    call of a compiled function is slower, and the drafter reads the tokens of the steps without drafts.
    """

    def __init__(self, steps: list[CompiledFunction | None]):
        """Makes a clock for the steps of a policy's lengths; None for a length that is not compiled."""
        self._steps = steps

    def record(self, step: CompiledFunction, seconds: float, *, resumes: bool) -> None:
        """Adds a measurement.

        Args:
            step: that was run.
            seconds: its wall time.
            resumes: whether the step before was one without drafts, and this one has drafts.
        """
        step.num_calls += 1
        if step.num_calls == 1:
            return
        if resumes:
            if np.isfinite(step.seconds):
                extra = max(seconds - step.seconds, 0.0)
                step.resume_seconds = extra if np.isnan(step.resume_seconds) else (step.resume_seconds + extra) / 2
            return
        if np.isnan(step.seconds):
            step.seconds = seconds
            return
        # The limits keep an interruption by another process from spoiling the estimate.
        change = WEIGHT * (float(np.clip(seconds, 0.5 * step.seconds, 2 * step.seconds)) - step.seconds)
        step.seconds += change
        for other in self._steps:
            if other is not None and other is not step and np.isfinite(other.seconds):
                other.seconds = max(other.seconds + change / 2, 0.1 * other.seconds)

    def times(self) -> StepTimes:
        """Returns the estimates; under `jax.distributed` those of process 0, so that all processes plan the same."""
        seconds = [np.nan if step is None else step.seconds for step in self._steps]
        resume = [step.resume_seconds for step in self._steps if step is not None]
        resume = [value for value in resume if np.isfinite(value)]
        times = StepTimes(np.asarray(seconds, np.float32), np.asarray(max(resume, default=np.nan), np.float32))
        if jax.process_count() == 1:
            return times
        from jax.experimental.multihost_utils import broadcast_one_to_all

        return StepTimes(*broadcast_one_to_all(times))
