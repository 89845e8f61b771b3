"""Measures steps, for policies that choose the draft length by time."""

import contextlib
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.config import draft_len_bucket
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.policy_runner import StepTimes
from bass_jax.models.weights import product
from bass_jax.runtime.files import read_json, write_atomically
from bass_jax.runtime.jit_cache import JIT_CACHE, CompiledFunction

NUM_FIRST = 3
"""The first measurements of a step, of which the shortest is the estimate: interruptions only make steps slower."""

GPU_DRAFT_COST = 0.09
"""The time that a step takes longer per draft, relative to a regular step, that is assumed for a GPU. Of targets with
7.8 to 35 billion parameters it was 0.03 to 0.25, with a median of 0.09 (H200 and H100, batch 1 to 32, 2026-11-26)."""

WEIGHT = 0.2
"""Weight of a later measurement in the estimate."""


class StepClock:
    """Estimates the time of a step of each draft length for one batch size.

    The estimates are stored with the compiled steps, so that later runs of the process start from them. A change that
    affects all lengths, such as a longer context or a busier machine, is seen only in the length that is in use;
    therefore the estimates of the others change by half of the same factor. A number of seconds instead of a factor
    would make the shortest steps seem too slow after long ones on a busy machine.

    The time of a step that follows compilation, or steps without drafts, is not the time of a usual step: the first
    call of a compiled function is slower, and the drafter reads the tokens of the steps without drafts.
    """

    def __init__(self, steps: list[CompiledFunction | None], prior: Sequence[float] | None = None):
        """Makes a clock.

        Args:
            steps: A compiled steps, one for each of a policy's lengths; None for a length that is not compiled.
            prior: A times from `calibrate`, for lengths that were not measured.
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
        if step.num_calls <= 1 + NUM_FIRST or np.isnan(step.seconds):
            step.seconds = float(np.fmin(step.seconds, seconds))
            return
        # The limits keep an interruption by another process from spoiling the estimate.
        change = WEIGHT * (min(max(seconds, 0.5 * step.seconds), 2 * step.seconds) - step.seconds)
        for other in self._steps:
            if other is not None and other is not step:
                other.seconds *= 1 + change / step.seconds / 2
        step.seconds += change

    def times(self) -> StepTimes:
        """Returns the estimates. Between measured lengths, the ratio to the prior is interpolated.

        A compiled step that was not measured is assumed to be as fast as the fastest one that was, so that it is soon
        measured: if the prior is wrong, an estimate from it may never be checked.
        """
        seconds = [math.nan if step is None else step.seconds for step in self._steps]
        fastest = min((one for one in seconds if math.isfinite(one)), default=math.nan)
        if self._prior is not None:
            pairs = enumerate(zip(seconds, self._prior, strict=True))
            ratios = {index: own / prior for index, (own, prior) in pairs if math.isfinite(own)} or {0: 1.0}
            all_ratios = np.interp(range(len(seconds)), list(ratios), list(ratios.values()))
            seconds = (all_ratios * self._prior).tolist()
        if math.isfinite(fastest):
            pairs = zip(seconds, self._steps, strict=True)
            seconds = [min(fastest, one) if step and math.isnan(step.seconds) else one for one, step in pairs]
        resume = [step.resume_seconds for step in self._steps if step is not None]
        resume = max((value for value in resume if math.isfinite(value)), default=math.nan)
        is_compiled = np.asarray([step is not None for step in self._steps])
        return StepTimes(np.asarray(seconds, np.float32), is_compiled, np.asarray(resume, np.float32))


def is_measured(step: CompiledFunction) -> bool:
    """Returns whether the estimate of a step can be trusted."""
    return step.num_calls > NUM_FIRST and np.isfinite(step.seconds)


def calibrate(pair: Pair, num_rows: int, lengths: Sequence[int]) -> list[float]:
    """Estimates the relative time of a step of each draft length before any is compiled: A numbers.

    It times the product of the target's largest matrix with as many tokens as a step verifies. A draft takes the
    drafter's share of the target's weights. The products are timed once per process, and not for odd lengths, whose
    times are interpolated: each product delays the first request of a process by 0.03 to 0.05 s (two cores,
    2026-11-27). If compiled code is kept on disk, the times are stored with it: with other times, the next process may
    start with a step that is not compiled.

    On a GPU a product takes less time than the call that starts it, so a cost is assumed.
    """
    if jax.default_backend() != "cpu":
        return [1 + GPU_DRAFT_COST * length for length in lengths]
    weights = _matrices(pair.target)
    own = [one for one in _matrices(pair.drafter) if not any(one is other for other in weights)]
    share = sum(one.nbytes for one in own) / sum(one.nbytes for one in weights)
    largest = max(weights, key=lambda one: one.size)
    timed = [length for length in lengths if length % 2 == 0 or length in (lengths[0], lengths[-1])]
    measured = _product_seconds(largest, [num_rows * (1 + draft_len_bucket(length)) for length in timed])
    seconds = np.interp(lengths, timed, measured)
    return [float(one + share * length * seconds[0]) for one, length in zip(seconds, lengths, strict=True)]


def _matrices(model: Any) -> list[Any]:
    leaves = [leaf for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.Array) and leaf.ndim > 1]
    return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]


def _product_seconds(weight: Any, num_tokens: Sequence[int]) -> list[float]:
    """Returns the times of products, those of an earlier process if they are on disk.

    Several processes compute a product together, so none of them may find its time on disk where another does not.
    """
    folder = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if not folder or "://" in folder or not weight.is_fully_addressable:
        return _measured_product_seconds(weight, num_tokens)
    parts = (*weight.shape, weight.dtype, len(weight.sharding.device_set), *num_tokens)
    path = Path(folder, f"products-{'-'.join(map(str, parts))}.json")
    with contextlib.suppress(ValueError, KeyError):
        return read_json(path)["seconds"]
    seconds = _measured_product_seconds(weight, num_tokens)
    with contextlib.suppress(OSError):  # jax does not require that it can be written either.
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"seconds": seconds}))
    return seconds


def _measured_product_seconds(weight: Any, num_tokens: Sequence[int]) -> list[float]:
    """Returns the shortest times of products, taken in turns, so that other work on the machine affects all of them."""
    inputs = [np.ones((num, weight.shape[-1]), weight.dtype) for num in num_tokens]
    steps = [JIT_CACHE.get(product, one, weight, in_background=True) for one in inputs]
    if np.isnan([step.seconds for step in steps]).any():
        turns = [[_call_seconds(step, one, weight) for step, one in zip(steps, inputs, strict=True)] for _ in range(4)]
        for step, seconds in zip(steps, np.min(turns[1:], axis=0), strict=True):
            step.seconds = float(seconds)
    return [step.seconds for step in steps]


def _call_seconds(function: CompiledFunction, *arguments: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start
