"""Compiles what a later process will run, so that it finds it in the compilation cache."""

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bass_jax.config import SpecConfig
from bass_jax.decoding.pair import Pair
from bass_jax.engine.generate import GenerateLoop
from bass_jax.runtime.jit_cache import JIT_CACHE
from bass_jax.sampling import SamplingParams


class WarmUp(NamedTuple):
    """What one batch and capacity took."""

    batch: int
    capacity: int
    seconds: float  # all of it: tracing, compiling or reading from the cache, and one prefill
    compile_seconds: float
    num_compiled: int


def warm_up(
    pair: Pair,
    spec: SpecConfig,
    *,
    batches: Sequence[int] = (1, 8),
    capacities: Sequence[int] = (256,),
    sampling: SamplingParams | None = None,
    steps: Sequence[str] = ("speculate", "decode"),
) -> Iterator[WarmUp]:
    """Compiles prefill and steps of every batch and capacity; see `bass_jax.runtime.xla_flags.use_compilation_cache`.

    Args:
        pair: target and drafter.
        spec: the rule and draft length.
        batches: rows, each bucketed.
        capacities: prompt with new tokens, each bucketed.
        sampling: default greedy; sampled steps are other executables.
        steps: which of `bass_jax.generate`'s.

    Raises:
        ValueError: if a capacity is below 2, or exceeds the target's context.
    """
    for batch, capacity in itertools.product(batches, capacities):
        if capacity < 2:
            raise ValueError(f"capacities={list(capacities)}: expected at least 2, a prompt and a token")
        start, before = time.perf_counter(), (JIT_CACHE.compile_seconds, JIT_CACHE.num_compiled)
        for index, step in enumerate(steps):
            # Seeds, as the command line gives them, and a key.
            seeds = None if index else range(batch)
            GenerateLoop(
                pair, [[0]] * batch, spec, sampling=sampling, max_new_tokens=capacity - 1, step=step, seeds=seeds
            )
        yield WarmUp(
            batch, capacity, time.perf_counter() - start,
            JIT_CACHE.compile_seconds - before[0], JIT_CACHE.num_compiled - before[1],
        )  # fmt: skip
