"""Compiles steps in advance, so that a later process finds them in the compilation cache."""

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bass_jax.config import SpecConfig
from bass_jax.decoding.pair import Pair
from bass_jax.engine.generate import GenerateLoop
from bass_jax.policies import auto
from bass_jax.runtime.jit_cache import JIT_CACHE
from bass_jax.sampling import SamplingParams


class WarmUp(NamedTuple):
    """The times of one batch size and capacity."""

    batch: int
    capacity: int
    seconds: float  # in total: tracing, compiling or reading from the cache, and one prefill
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
    """Compiles the prefill and the steps; see `bass_jax.runtime.xla_flags.use_compilation_cache`.

    Args:
        pair: target and drafter.
        spec: the configuration of the steps; if its draft length is None, all lengths of the policy ``"auto"``.
        batches: numbers of rows; each is rounded up to its bucket.
        capacities: tokens of prompt and output; each is rounded up to its bucket.
        sampling: default greedy. Sampled steps are compiled separately.
        steps: names of steps, as in `DecodeOptions.step`.

    Raises:
        ValueError: if a capacity is below 2 or exceeds the target's context.
    """
    for batch, capacity in itertools.product(batches, capacities):
        if capacity < 2:
            raise ValueError(f"capacities={list(capacities)}: expected at least 2, a prompt and a token")
        start, before = time.perf_counter(), (JIT_CACHE.compile_seconds, JIT_CACHE.num_compiled)
        for index, step in enumerate(steps):
            # The first step with seeds, as on the command line, the others with a key.
            seeds = None if index else range(batch)
            options = {"sampling": sampling, "max_new_tokens": capacity - 1, "step": step, "seeds": seeds}
            if step == "speculate" and spec.draft_len is None:
                options["policy"] = auto(use_clock=False)  # A policy without a clock compiles all lengths in advance.
            GenerateLoop(pair, [[0]] * batch, spec, **options)
        yield WarmUp(
            batch=batch,
            capacity=capacity,
            seconds=time.perf_counter() - start,
            compile_seconds=JIT_CACHE.compile_seconds - before[0],
            num_compiled=JIT_CACHE.num_compiled - before[1],
        )
