"""How long a jitted function takes on its device."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Timing(NamedTuple):
    """Time per call over several repeats, in microseconds."""

    median_us: float
    spread_us: float
    """Slowest repeat less fastest."""


def measure(function: Callable[..., Any], *args: Any, num_calls: int = 20, num_repeats: int = 7) -> Timing:
    """Times `function(*args)` after a warm-up that compiles it.

    The calls of a repeat are dispatched one after the other and waited for once, so that what is timed is the device
    and not the dispatch, as long as a call takes longer than its dispatch.

    Args:
        function: A jitted function of arrays.
        *args: Its arguments, on the device.
        num_calls: Calls per repeat.
        num_repeats: Repeats.

    Returns:
        Median and spread of the time per call.
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
    """Bytes per second that the device reads and writes in a copy: the roof of a memory-bound kernel.

    Args:
        num_bytes: Size of the array; larger than the caches.

    Returns:
        Bytes read and written per second.
    """
    values = jnp.zeros((num_bytes // 4,), jnp.float32)
    timing = measure(jax.jit(lambda x: x + 1.0), values)
    return 2 * num_bytes / (timing.median_us * 1e-6)
