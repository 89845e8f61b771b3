"""Formulations that exist because XLA's CPU backend is slow for the obvious one; each says what it gains.

On other platforms every function computes the obvious expression.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from bass_jax.typing import Array, Float, Int
from kernels_pallas.targets import current_target

CPU_COMPILER_OPTIONS = {"xla_cpu_prefer_vector_width": 512}
"""Compiler options for a CPU; XLA for a GPU ignores them.

XLA's default is 256 bits, with which a product of one row, computed on one core, reads memory more slowly than the core
can. On CPUs with 256-bit vectors the option has no effect.
"""

_ARGMAX_BLOCK = 128
_MAX_PARTS = 4  # on two cores 2, 4 and 8 are equally fast


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


def as_matrices(
    x: Float[Array, "*rows D"], weight: Float[Array, "D *columns"]
) -> tuple[Float[Array, "M D"], Float[Array, "D C"]]:
    """Flattens the operands of a product to matrices.

    The gradient of a product with more axes sums over several axes at once, which takes ten times as long on a CPU.
    """
    return x.reshape(-1, x.shape[-1]), weight.reshape(len(weight), -1)


def matmul(rows: Float[Array, "M D"], matrix: Float[Array, "D C"], dtype: Any = None) -> Array:
    """Returns ``rows @ matrix`` in `dtype`, by default that of the operands.

    XLA for a CPU computes a product of one row on one core, which cannot saturate the memory, but distributes a batch
    of products over the cores. A float32 product of one row is therefore computed as a batch of partial sums. On a mesh
    it is not, because the mesh partitions it.
    """
    parts = 1
    is_one_row = len(rows) == 1 and rows.dtype == matrix.dtype == jnp.float32
    if is_one_row and jax.sharding.get_abstract_mesh().empty and current_target().platform == "cpu":
        parts = math.gcd(len(matrix), _MAX_PARTS)
    if parts == 1:
        return jnp.dot(rows, matrix, preferred_element_type=dtype)
    sums = jnp.einsum("pd,pdc->pc", rows.reshape(parts, -1), matrix.reshape(parts, -1, matrix.shape[1]))
    return sums.sum(axis=0, keepdims=True).astype(dtype or rows.dtype)


def matmul_transposed(rows: Float[Array, "M C"], matrix: Float[Array, "D C"]) -> Float[Array, "M D"]:
    """Returns ``rows @ matrix.T`` in float32 as a contraction, because XLA for a CPU would copy the transpose."""
    return jnp.einsum("mc,dc->md", rows, matrix, preferred_element_type=jnp.float32)
