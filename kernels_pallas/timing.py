"""Measures the time of a function on its device."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

NUM_CALLS, NUM_REPEATS = 20, 7


class Timing(NamedTuple):
    """The time per call in microseconds, over several repeats."""

    median_us: float
    spread_us: float
    """Slowest repeat minus fastest repeat."""


def compile_calls(function: Callable[..., Any], *args: Any, num_calls: int = NUM_CALLS) -> Callable[..., Any]:
    """Compiles a program that calls `function(*args)` several times in turn and returns the last result.

    A kernel of a few microseconds takes less time than its dispatch. In one program there is one dispatch.

    Args:
        function: A function of arrays.
        *args: Its arguments, or their shapes.
        num_calls: Number of calls.
    """
    leaves, structure = jax.tree.flatten(args)
    smallest = min(range(len(leaves)), key=lambda index: leaves[index].size)

    def run(leaves: list[jax.Array]) -> Any:
        def call(_: Any, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            of_call = [carry[0] if index == smallest else leaf for index, leaf in enumerate(leaves)]
            out = function(*jax.tree.unflatten(structure, of_call))
            # XLA must not move the call out of the loop, so an argument depends on the call before.
            return jax.lax.optimization_barrier((carry[0], out))

        out = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, *args))
        return jax.lax.fori_loop(0, num_calls, call, (leaves[smallest], out))[1]

    program = jax.jit(run).lower(leaves).compile()
    return lambda *args: program(jax.tree.leaves(args))


def time_program(
    program: Callable[..., Any], *args: Any, num_calls: int = NUM_CALLS, num_repeats: int = NUM_REPEATS
) -> Timing:
    """Times the calls of a program of `compile_calls`; the arguments are those of `time_calls`."""
    jax.block_until_ready(program(*args))
    repeats = []
    for _ in range(num_repeats):
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        repeats.append((time.perf_counter() - start) / num_calls * 1e6)
    return Timing(statistics.median(repeats), max(repeats) - min(repeats))


def time_calls(
    function: Callable[..., Any], *args: Any, num_calls: int = NUM_CALLS, num_repeats: int = NUM_REPEATS
) -> Timing:
    """Times `function(*args)` in programs of several calls.

    Args:
        function: A function of arrays.
        *args: Its arguments, on the device.
        num_calls: Calls per repeat.
        num_repeats: Number of repeats.
    """
    program = compile_calls(function, *args, num_calls=num_calls)
    return time_program(program, *args, num_calls=num_calls, num_repeats=num_repeats)


def copy_bandwidth(num_bytes: int = 1 << 30) -> float:
    """Returns the bytes per second that a copy reads and writes: an upper bound for a memory-bound kernel.

    Args:
        num_bytes: Size of the array; larger than the device's caches.
    """
    values = jnp.zeros((num_bytes // 4,), jnp.float32)
    timing = time_calls(lambda x: x + 1.0, values)
    return 2 * num_bytes / (timing.median_us * 1e-6)
