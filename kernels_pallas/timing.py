"""Measures the time of a jitted function on its device."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Timing(NamedTuple):
    """The time per call in microseconds, over several repeats."""

    median_us: float
    spread_us: float
    """Slowest repeat minus fastest repeat."""


def time_calls(function: Callable[..., Any], *args: Any, num_calls: int = 20, num_repeats: int = 7) -> Timing:
    """Times `function(*args)` after one call that compiles it.

    The calls of a repeat are dispatched back to back, and only the last one is waited for. This times the device rather
    than the dispatch if a call takes longer than its dispatch.

    Args:
        function: A jitted function of arrays.
        *args: Its arguments, on the device.
        num_calls: Calls per repeat.
        num_repeats: Number of repeats.
    """
    jax.block_until_ready(function(*args))
    repeats = []
    for _ in range(num_repeats):
        start = time.perf_counter()
        for _ in range(num_calls):
            result = function(*args)
        jax.block_until_ready(result)
        repeats.append((time.perf_counter() - start) / num_calls * 1e6)
    return Timing(statistics.median(repeats), max(repeats) - min(repeats))


def copy_bandwidth(num_bytes: int = 1 << 30) -> float:
    """Returns the bytes per second that a copy reads and writes: an upper bound for a memory-bound kernel.

    Args:
        num_bytes: Size of the array; larger than the device's caches.
    """
    values = jnp.zeros((num_bytes // 4,), jnp.float32)
    timing = time_calls(jax.jit(lambda x: x + 1.0), values)
    return 2 * num_bytes / (timing.median_us * 1e-6)
