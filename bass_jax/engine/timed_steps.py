"""Chooses which compiled step runs, for policies that choose the draft length by measured times."""

import math
from collections.abc import Sequence

import jax
import numpy as np

from bass_jax.config import draft_len_bucket
from bass_jax.decoding.compiled_steps import CompiledSteps
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.policy_runner import StepTimes, no_times
from bass_jax.decoding.state import SpecState
from bass_jax.engine.step_clock import StepClock, calibrate, is_measured
from bass_jax.policies.protocol import plan_bucket
from bass_jax.runtime.jit_cache import JIT_CACHE, CompiledFunction
from bass_jax.runtime.processes import Channel

MAX_MEASURED = 4
"""Steps per batch size that are compiled for a policy that measures times."""

MAX_FIRST = 4
"""Drafts of the step that is compiled first, at most. Which of 4 and 8 seems better differs between processes, and the
compiled code on disk is that of one of them."""


class TimedSteps:
    """The compiled steps of a run, and the times of each batch size.

    A policy without a clock gets the step that it asks for. One with a clock gets the nearest compiled step until
    compiling another one is worth its time.

    Attributes:
        uses_clock: whether the policy measures times.
    """

    def __init__(self, steps: CompiledSteps, channel: Channel | None):
        """Measures nothing yet.

        Args:
            steps: the compiled steps.
            channel: from process 0 to the others, on a mesh over several processes; else None.
        """
        self._steps, self._channel = steps, channel
        self.uses_clock: bool = getattr(steps.policy, "use_clock", False)
        # On a CPU the compiler would take the processors from the steps, which then take twice as long.
        self._compiles_beside = self.uses_clock and channel is None and jax.default_backend() != "cpu"
        self._clock: StepClock | None = None
        self._calibration: dict[int, Sequence[float] | None] = {}
        self._compile_cost = 0.0  # seconds that a further step is expected to take
        self._may_compile = False
        self._is_timed = False
        self._has_drafted = True

    def skip_next(self) -> None:
        """Does not time the next step, because other work comes before it, such as a pass over a prompt."""
        self._is_timed = False

    def bucket(self, num_wanted: int, num_rows: int) -> int:
        """Returns the bucket to run for `num_wanted` drafts in a batch of `num_rows`.

        With a policy that measures times, a further step is compiled only when steps have run for as long as it takes
        to compile one, in addition to the compilations since, and at most `MAX_MEASURED` are compiled. Else, and while
        a thread compiles it, the nearest compiled step is used. A compiled step with fewer drafts that was not measured
        often enough comes first. A step that is not timed, such as one after a pass over a prompt, runs with a measured
        length: while requests arrive, slow lengths would otherwise run in many steps that measure nothing.
        """
        bucket, found = plan_bucket(self._steps.buckets, num_wanted), self._found(num_rows)
        if self._clock is None:
            return bucket
        measured = [one for one, step in found.items() if is_measured(step)]
        if not self._is_timed and measured and bucket in found:
            return max((one for one in measured if one <= bucket), default=min(measured))
        unmeasured = [one for one in found if one < bucket and one not in measured]
        if unmeasured or bucket in found:
            return min(unmeasured, default=bucket)
        if not found:
            return max((one for one in self._steps.buckets if one <= min(bucket, MAX_FIRST)), default=bucket)
        if self._may_compile and len(found) < MAX_MEASURED:
            return bucket
        return min((one for one in found if one >= bucket), default=max(found))

    def next_bucket(self, num_wanted: int, pair: Pair, state: SpecState) -> int:
        """Returns `bucket` for the next step. On a GPU a thread compiles a further one while a compiled one is used."""
        num_rows = len(state.lengths)
        bucket = self.bucket(num_wanted, num_rows)
        if not self._compiles_beside or bucket in (found := self._found(num_rows)) or not found:
            return bucket
        self._steps.start(bucket, pair, state)
        JIT_CACHE.run_seconds = max(JIT_CACHE.run_seconds - self._compile_cost, 0.0)
        self._may_compile = False
        return self.bucket(num_wanted, num_rows)

    def first_buckets(self, num_wanted: int, num_rows: int) -> Sequence[int]:
        """Returns the buckets to compile in advance.

        They are all buckets. A policy that measures times and has more than `MAX_MEASURED` gets the one without drafts
        and the one for `num_wanted` drafts, from which it starts.
        """
        if not self.uses_clock or len(self._steps.buckets) <= MAX_MEASURED:
            return self._steps.buckets
        return sorted({self._steps.buckets[0], self.bucket(num_wanted, num_rows)})

    def is_ready(self, num_wanted: int, num_rows: int) -> bool:
        """Returns whether the step for `num_wanted` drafts is compiled, and has run if its time is measured."""
        step = self._steps.find(self.bucket(num_wanted, num_rows), num_rows)
        return step is not None and (self._clock is None or step.num_calls > 0)

    def record(self, bucket: int, num_rows: int, seconds: float) -> None:
        """Records the time of a step that has run. A thread that compiles slows steps down, so they do not count."""
        is_compiling, step = self._steps.is_compiling(), self._steps.find(bucket, num_rows)
        if self._clock is not None and self._is_timed and not is_compiling and step is not None:
            self._clock.record(step, seconds, resumes=bucket > 0 and not self._has_drafted)
        self._is_timed, self._has_drafted = not is_compiling, bucket > 0

    def times(self, pair: Pair, state: SpecState) -> StepTimes:
        """Returns the times of the policy's lengths for the batch, and decides whether another step may be compiled.

        On a mesh over several processes all take those of process 0, so that they plan and compile the same.
        """
        policy, num_rows = self._steps.policy, len(state.lengths)
        assert policy is not None
        if not self.uses_clock:
            return no_times(policy)
        if num_rows not in self._calibration:
            self._steps.find_all(pair, state)
            has_cost = getattr(policy, "cost", None) is not None
            self._calibration[num_rows] = None if has_cost else calibrate(pair, num_rows, policy.lengths)
        found = self._found(num_rows)
        buckets = [draft_len_bucket(length) for length in policy.lengths]
        self._clock = StepClock([found.get(bucket) for bucket in buckets], self._calibration[num_rows])
        times = self._clock.times()
        # The compilation cache may hold the steps that are compiled, and not the next one.
        costs = [step.compile_seconds + step.saved_seconds for step in found.values()]
        self._compile_cost = max(costs, default=math.inf)
        self._may_compile = JIT_CACHE.run_seconds >= self._compile_cost and not self._steps.is_compiling()
        if not self._may_compile or len(found) >= MAX_MEASURED:
            # A length that cannot be compiled now runs in the next larger step, and takes as long. Instead of one above
            # all of them the longest one runs, so it gets a time with which it cannot seem better. The first step that
            # is compiled has a power of two as its length, so that a process finds it in the compilation cache although
            # its estimates differ a bit.
            estimates = dict(zip(buckets, times.step_seconds.tolist(), strict=True))
            estimates |= {bucket: step.seconds for bucket, step in found.items() if np.isfinite(step.seconds)}
            usable = found or [bucket for bucket in buckets if bucket & (bucket - 1) == 0]
            larger = [min((one for one in usable if one >= bucket), default=max(usable)) for bucket in buckets]
            seconds = [estimates[one] * max((1 + own) / (1 + one), 1) for own, one in zip(buckets, larger, strict=True)]
            times = times._replace(step_seconds=np.asarray(seconds, np.float32))
        elif found.keys() == {0}:
            # A calibration that was wrong, because other processes were busy, must not keep drafts from being tried.
            short = min(np.searchsorted(buckets, 2), len(buckets) - 1)
            times.step_seconds[short] = min(times.step_seconds[short], times.step_seconds[0])
        if self._channel is not None:
            times, self._may_compile = self._channel.share((times, self._may_compile))
        return times

    def _found(self, num_rows: int) -> dict[int, CompiledFunction]:
        """Returns the compiled steps of a batch size by bucket."""
        steps = ((bucket, self._steps.find(bucket, num_rows)) for bucket in self._steps.buckets)
        return {bucket: step for bucket, step in steps if step is not None}
