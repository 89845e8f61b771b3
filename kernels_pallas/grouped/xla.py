"""Grouped products in plain XLA, for CPUs and for GPUs where no kernel fits."""

import jax
import jax.numpy as jnp

_BY_GROUP = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])


def grouped_product_xla(rows: jax.Array, weights: jax.Array, groups: jax.Array) -> jax.Array:
    """Computes `kernels_pallas.ops.grouped_product` as `jax.lax.ragged_dot_general`; `groups` are 0 ... G.

    XLA computes it as products of masked rows with the matrices of all groups.
    """
    weights, repeats = weights.astype(rows.dtype), groups.shape[0] // rows.shape[0]
    sizes = (groups[:, None] == jnp.arange(weights.shape[0])).sum(axis=0, dtype=jnp.int32)
    order = jnp.argsort(groups, stable=True)
    products = jax.lax.ragged_dot_general(
        rows[order // repeats], weights, sizes, _BY_GROUP, preferred_element_type=jnp.float32
    )
    # A gather back, because the order of a scattered sum is not fixed on a GPU.
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    return products[back]
