"""Grouped products in plain XLA, for CPUs and for GPUs where no kernel fits."""

import jax
import jax.numpy as jnp

_BY_GROUP = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])


def grouped_product_xla(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """Computes `kernels_pallas.ops.grouped_product` as `jax.lax.ragged_dot_general`.

    XLA computes it as products of masked rows with the matrices of all groups.
    """
    weights = weights.astype(rows.dtype)
    return jax.lax.ragged_dot_general(rows, weights, sizes, _BY_GROUP, preferred_element_type=jnp.float32)
