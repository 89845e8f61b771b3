"""Measures the time of a function on its device."""

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


class RepeatedCalls(NamedTuple):
    """A compiled program that calls a function several times in turn and returns the last result."""

    program: Callable[[list[jax.Array]], Any]
    num_calls: int

    def __call__(self, *args: Any) -> Any:
        """Runs the program on the arguments of the function."""
        return self.program(jax.tree.leaves(args))


def compile_calls(function: Callable[..., Any], *args: Any, num_calls: int = 20) -> RepeatedCalls:
    """Compiles a program of several calls of a function.

    A kernel of a few microseconds takes less time than its dispatch. A program is dispatched once.

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

    return RepeatedCalls(jax.jit(run).lower(leaves).compile(), num_calls)


def time_calls(calls: RepeatedCalls, *args: Any, num_repeats: int = 7) -> Timing:
    """Times one call of a program of several.

    Args:
        calls: From `compile_calls`.
        *args: The arguments of its function, on the device.
        num_repeats: Runs of the program, after one that is not counted.
    """
    jax.block_until_ready(calls(*args))
    repeats = []
    for _ in range(num_repeats):
        start = time.perf_counter()
        jax.block_until_ready(calls(*args))
        repeats.append((time.perf_counter() - start) / calls.num_calls * 1e6)
    return Timing(statistics.median(repeats), max(repeats) - min(repeats))


def copy_bandwidth(num_bytes: int = 1 << 30) -> float:
    """Returns the bytes per second that a copy reads and writes: an upper bound for a memory-bound kernel.

    Args:
        num_bytes: Size of the array; larger than the device's caches.
    """
    values = jnp.zeros((num_bytes // 4,), jnp.float32)
    timing = time_calls(compile_calls(lambda x: x + 1.0, values), values)
    return 2 * num_bytes / (timing.median_us * 1e-6)
