"""Formulations that exist because XLA's CPU backend is slow for the obvious one; each says what it gains.

On other platforms every function computes the obvious expression.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bass_jax.typing import Array, Bool, Float, Int, Key
from kernels_pallas.acceptance.random_bits import gives_bits_of, gumbel_at
from kernels_pallas.targets import current_target

CPU_COMPILER_OPTIONS = {"xla_cpu_prefer_vector_width": 512}
"""Compiler options for a CPU; XLA for a GPU ignores them.

XLA's default is 256 bits, with which a product of one row, computed on one core, reads memory more slowly than the core
can. On CPUs with 256-bit vectors the option has no effect.
"""

CPU_COMPILE_TIME_OPTIONS = {"xla_backend_optimization_level": 1, "xla_cpu_opt_preset": "CPU_OPT_PRESET_FAST_COMPILE"}
"""Options with which a step compiles faster on a CPU and runs as fast (SmolLM2-135M, two cores with AVX2, 2026-11-28).

Level 1 takes 0.9 of the time of level 2, and the preset 0.8 of the time without it. XLA's default is level 3. Level 0
makes steps 1.3 to 1.8 times as slow. XLA for a GPU does not ignore the level.
"""

_ARGMAX_BLOCK = 128
_MAX_PARTS = 4  # on two cores 2, 4 and 8 are equally fast
_ROWS = 8  # rows that are computed together
_MAX_ROWS, _MAX_ROWS_AVX512 = 64, 8  # with more rows, a product is left as it is; the second one in float32


def argmax(scores: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """Returns the int32 index of the largest score, the first of equal ones; an arbitrary index if one is NaN.

    XLA for a CPU computes an argmax one element at a time: five rows of a vocabulary of 49,152 take more than a
    millisecond. The maximum of every block is vectorized, so this searches one block per row only.
    """
    num_blocks = -(-scores.shape[-1] // _ARGMAX_BLOCK)
    if num_blocks < 4 or current_target().platform != "cpu":
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)
    missing = num_blocks * _ARGMAX_BLOCK - scores.shape[-1]
    if missing:
        widths = [(0, 0)] * (scores.ndim - 1) + [(0, missing)]
        scores = jnp.pad(scores, widths, constant_values=-jnp.inf)
    blocks = scores.reshape(*scores.shape[:-1], num_blocks, _ARGMAX_BLOCK)
    block = jnp.argmax(blocks.max(axis=-1), axis=-1)
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return (block * _ARGMAX_BLOCK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def gumbel(keys: Key[Array, "B"], size: int) -> Float[Array, "B size"]:
    """Returns one vector of Gumbel noise per key, float32.

    On a CPU, jax computes Threefry in a loop, each pass of which reads and writes two arrays of all numbers. In one
    expression the same numbers take a third to a seventh of the time: 1.4 ms instead of 4.5 for 8 rows of 49,152, and
    4.9 instead of 33 for 32 rows (two cores with AVX2, 2026-11-29).
    """
    if current_target().platform != "cpu" or not gives_bits_of(keys):
        return jax.vmap(lambda key: jax.random.gumbel(key, (size,), jnp.float32))(keys)
    words = jax.random.key_data(keys)
    return gumbel_at((words[:, :1], words[:, 1:]), jnp.arange(size, dtype=jnp.uint32)[None])


def call_if(
    condition: Bool[Array, ""], function: Callable[[Array], Array], values: Array, *, otherwise: Array
) -> Array:
    """Returns ``function(values)``; on a CPU `otherwise` if `condition` is False, where both must mean the same.

    The search for top-k, top-p and min-p makes no pass where all three are off, but its arrays, of the logits' size,
    are written. Without them drafting and acceptance sample in 20 ms instead of 30 at batch 32, and in 2.7 instead of
    3.6 at batch 8 (one draft, vocabulary of 49,152, two cores with AVX-512, 2026-11-29). On a GPU a condition would
    split the CUDA graph of the step.
    """
    if current_target().platform != "cpu":
        return function(values)
    return jax.lax.cond(condition, function, lambda _: otherwise, values)


def matmul(rows: Float[Array, "M D"], matrix: Float[Array, "C D"], dtype: Any = None) -> Float[Array, "M C"]:
    """Returns ``rows @ matrix.T`` in `dtype`, by default that of the operands.

    XLA for a CPU rearranges the right operand of a product before it multiplies. With few rows this takes longer than
    the product, so the matrix is the left operand here. A barrier keeps XLA from exchanging the operands again. The
    products of a pass of SmolLM2-135M with 2 to 16 rows take 41 to 58 ms instead of 64 to 124 (two cores with AVX2,
    2026-11-24). Some numbers of rows take longer than the next multiple of 8, to which they are padded.

    With AVX-512 this holds for at most 8 rows in float32. The products of 18 to 56 rows take 0.6 to 0.9 of the time if
    they are left as they are, and steps of batch 8 with 2, 4 and 6 drafts 82, 109 and 126 ms instead of 94, 121 and 180
    (2026-11-28).

    A product of one row is computed on one core, which cannot saturate the memory, but a batch of products is
    distributed over the cores. One row is therefore multiplied by a batch of parts of the matrix.

    On a CPU with AVX-512 BF16, XLA's products in bfloat16 are fast as they are, but not with one row, which is padded
    to two. A pass of SmolLM2-135M over 1, 5 and 40 tokens takes 47, 44 and 69 ms instead of 151, 171 and 227
    (2026-11-27).

    On a mesh the product is left as it is, because the mesh partitions it.
    """
    num_rows, is_float32 = len(rows), rows.dtype == matrix.dtype == jnp.float32
    is_plain = not jax.sharding.get_abstract_mesh().empty or current_target().platform != "cpu"
    max_rows = _MAX_ROWS_AVX512 if is_float32 and _has_instructions("avx512f") else _MAX_ROWS
    if is_plain or num_rows > max_rows:
        return jnp.einsum("md,cd->mc", rows, matrix, preferred_element_type=dtype)
    if rows.dtype == matrix.dtype == jnp.bfloat16 and _has_instructions("avx512_bf16"):
        rows = jnp.pad(rows, ((0, max(2 - num_rows, 0)), (0, 0)))
        return jnp.einsum("md,cd->mc", rows, matrix, preferred_element_type=dtype)[:num_rows]
    if num_rows == 1 and is_float32:
        num_parts = math.gcd(len(matrix), _MAX_PARTS)
        parts = matrix.reshape(num_parts, -1, matrix.shape[1])
        row = jnp.broadcast_to(rows, (num_parts, rows.shape[1]))
        return jnp.einsum("pd,pcd->pc", row, parts).reshape(1, -1).astype(dtype or rows.dtype)
    padding = -num_rows % _ROWS if _is_slow(num_rows) else 0
    columns = jnp.pad(rows, ((0, padding), (0, 0))).T
    product = jnp.dot(matrix, columns, preferred_element_type=dtype)
    return jax.lax.optimization_barrier(product).T[:num_rows]


def _is_slow(num_rows: int) -> bool:
    """Returns whether a product takes longer than one of the next multiple of 8 rows.

    Products of 6, 10 and 28 rows take 62, 87 and 134 ms if they are padded instead of 72, 112 and 151, those of 5, 9
    and 20 rows 58, 80 and 107 instead of 48, 66 and 90 (SmolLM2-135M, two cores with AVX2, 2026-11-28).
    """
    if num_rows < _ROWS and _has_instructions("avx512f"):
        return False
    return num_rows % 16 > 5 and num_rows % 16 != 9


@functools.cache
def _has_instructions(name: str) -> bool:
    """Returns whether this CPU has the instructions that Linux calls `name`."""
    path = Path("/proc/cpuinfo")
    return path.exists() and name in path.read_text().split()


def call_beside_steps(function: Callable, *arguments: Any) -> Any:
    """Returns ``function(*arguments)`` for a compiled function that uses no result of a step that is running.

    jax runs what one thread calls on a CPU in order, so that a plan waits for the step that was dispatched before it,
    and the step after it is not dispatched while the device is busy. A second thread does not wait: where the policy
    ``auto`` does not draft, a token takes 1.03 times as long as a regular one instead of 1.05 (SmolLM2-135M, batch 8,
    two cores, 2026-11-27).
    """
    if jax.default_backend() != "cpu":
        return function(*arguments)
    return _thread().submit(function, *arguments).result()


@functools.cache
def _thread() -> Any:
    from concurrent.futures import ThreadPoolExecutor  # Only where steps run, not at every import.

    return ThreadPoolExecutor(1, "plan")
