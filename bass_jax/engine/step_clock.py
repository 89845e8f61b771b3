"""Measures steps, for policies that choose the draft length by time."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.config import draft_len_bucket
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.policy_runner import StepTimes
from bass_jax.runtime.jit_cache import JIT_CACHE, CompiledFunction

WEIGHT = 0.2
"""Weight of a new measurement in the estimate."""

CALIBRATION_BYTES = 2**28
"""Bytes of the target's weights that the calibration multiplies with, at most."""


class StepClock:
    """Estimates the time of a step of each draft length for one batch size.

    The estimates are stored with the compiled steps, so that later runs of the process start from them. A change that
    affects all lengths, such as a longer context or a busier machine, is seen only in the length that is in use;
    therefore half of every change of its estimate is added to the estimates of the others.

    The time of a step that follows compilation, or steps without drafts, is not the time of a usual step: the first
    call of a compiled function is slower, and the drafter reads the tokens of the steps without drafts.
    """

    def __init__(self, steps: list[CompiledFunction | None], prior: np.ndarray | None = None):
        """Makes a clock.

        Args:
            steps: A compiled steps, one for each of a policy's lengths; None for a length that is not compiled.
            prior: ``[A]`` float32, from `calibrate`, for lengths that were not measured.
        """
        self._steps, self._prior = steps, prior

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
        seconds = np.asarray([np.nan if step is None else step.seconds for step in self._steps], np.float32)
        if self._prior is not None:
            ratio = np.nanmean(seconds / self._prior) if np.isfinite(seconds).any() else 1.0
            seconds = np.where(np.isnan(seconds), ratio * self._prior, seconds)
        resume = [step.resume_seconds for step in self._steps if step is not None]
        resume = [value for value in resume if np.isfinite(value)]
        times = StepTimes(seconds.astype(np.float32), np.asarray(max(resume, default=np.nan), np.float32))
        if jax.process_count() == 1:
            return times
        from jax.experimental.multihost_utils import broadcast_one_to_all

        return StepTimes(*broadcast_one_to_all(times))


def calibrate(pair: Pair, num_rows: int, lengths: Sequence[int]) -> np.ndarray:
    """Estimates the time of a step of each draft length before any is compiled: ``[A]`` float32 seconds.

    It times the products of the target's weights with as many tokens as a step of each length verifies, and counts a
    draft as the share of weights that the drafter has.
    """
    weights = _weights(pair.target)
    own = [one for one in _weights(pair.drafter) if not any(one is other for other in weights)]
    share = sum(one.nbytes for one in own) / sum(one.nbytes for one in weights)
    used, num_bytes = [], 0
    for one in weights:
        if not used or num_bytes + one.nbytes <= CALIBRATION_BYTES:
            used.append(one)
            num_bytes += one.nbytes
    buckets = {0, *map(draft_len_bucket, lengths)}
    seconds = {bucket: _products_seconds(used, num_rows * (1 + bucket)) for bucket in buckets}
    times = [seconds[draft_len_bucket(length)] + share * length * seconds[0] for length in lengths]
    return np.asarray(times, np.float32)


def _weights(model: Any) -> list[Any]:
    leaves = [leaf for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.Array) and leaf.ndim > 1]
    return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]


def _products_seconds(weights: list[Any], num_tokens: int) -> float:
    inputs = {width: jnp.ones((num_tokens, width), jnp.float32) for width in {w.size // w.shape[-1] for w in weights}}
    step = JIT_CACHE.get(_products, weights, inputs)
    for _ in range(4):  # The first call is slower.
        start = time.perf_counter()
        jax.block_until_ready(step(weights, inputs))
        seconds = time.perf_counter() - start
        step.seconds = seconds if step.num_calls < 2 else min(step.seconds, seconds)
        step.num_calls += 1
    return step.seconds


def _products(weights: list[Any], inputs: dict[int, Any]) -> list[Any]:
    matrices = [weight.reshape(-1, weight.shape[-1]) for weight in weights]
    return [(inputs[len(one)].astype(one.dtype) @ one).sum(dtype=jnp.float32) for one in matrices]
